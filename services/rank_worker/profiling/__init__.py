"""Measures steps part by part, by waiting for the device where a part begins and ends."""
