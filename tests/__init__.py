"""Promises that Lockstep keeps, each as a test."""
