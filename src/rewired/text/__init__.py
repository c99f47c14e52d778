"""Text: rows of any shape that public datasets have, how they are read, and how they become tokens."""

MIX = "mix"  # what users call the packaged prose and chat, and lists that are looked up in
