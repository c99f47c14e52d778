"""Data: datasets in files or on the hub, as rows of tokens to train on, and what is to be known of them."""
