"""What the claims share: arms, the harness, the pair and the text that are measured."""
