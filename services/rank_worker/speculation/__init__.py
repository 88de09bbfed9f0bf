"""Drafts that ranks propose themselves: a draft model, or a head over the model's hidden states.

proposer.py        what the executor asks of either
places.py          drafts while they are made, place by place
draft_model.py     a smaller model with rows of its own
eagle.py           a head over hidden states
eagle_head.py      what such a head computes, and how it is read
draft.py           from what was loaded to a proposer
load.py            finds, checks and loads it
same_tokenizer.py  whether two models speak of the same tokens
"""
