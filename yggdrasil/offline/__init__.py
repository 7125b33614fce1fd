"""What `ygg compile` does: build, measure, calibrate, learn; nothing here runs while text is decoded."""
