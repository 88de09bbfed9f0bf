"""Speculation as the scheduler sees it: which drafts a plan carries, and whether any. Pure.

`speculator.Speculator` is what planner and core talk to. One file per idea:

    proposer     what every method of proposing drafts can do
    gram_index   where a run of tokens occurred before, exactly, in slices of work
    ngram        prompt lookup: what followed the same tokens earlier
    acceptance   how often a proposed token is the one that is sampled
    costs        how long a step takes by rows and by drafts per row
    policy       how many drafts the next plan carries: most tokens per millisecond
    positions    how often a draft that the ranks propose comes true, by its place
    model_drafts how many drafts the ranks propose, for whom, and what their rows read
    reading      what reading takes, and how much may be read beside a step
    probes       when drafts that lose are tried again
    drafting     one sequence as speculation sees it
    counters     what is told about drafts
    speculator   all of it for the running batch
"""
