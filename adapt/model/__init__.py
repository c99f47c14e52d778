"""Models of a training: the student, the parameters of it that are trained, and its teacher, the original."""
