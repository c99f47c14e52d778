"""Text: documents of any shape that public datasets have, and how they are read."""
