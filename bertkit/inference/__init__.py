"""Prediction with finished runs."""
