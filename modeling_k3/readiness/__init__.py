"""Is this machine ready? Which operators are right here (`doctor`), and how far the fast path is from the exact one
on one's own text (`precision`).
"""
