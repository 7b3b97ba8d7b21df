"""Softmax with its top k, and the argmax along walks."""
