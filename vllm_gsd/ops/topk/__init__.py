"""Softmax with top k, and the argmax along verification walks."""
