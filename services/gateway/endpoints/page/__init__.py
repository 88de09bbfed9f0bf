"""A web page that shows what the cluster does, and the feed of events that it reads."""
