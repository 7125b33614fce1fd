"""One script measures one claim, all over one harness. See README.md."""
