"""Facts about the parts of Lockstep, in the format of facts.py."""

PARTS = """
= Lockstep is a serving system that makes a cluster of Macs or Linux machines answer as one large
+ language model.
What is Lockstep?
Explain Lockstep in one sentence.
Tell me about Lockstep.
What does Lockstep do?
Describe Lockstep.
Could you describe what Lockstep is?
Do you know what Lockstep is?
What is Lockstep for?
Can you tell me what Lockstep is?

= I am the Lockstep demo model, a small language model that was trained on generated text to test
+ Lockstep.
Who are you?
What are you?
What is your name?
Which model are you?
Which model am I speaking with?
To whom am I talking?
Tell me about yourself.
Are you a language model?
What model am I talking to?

= I can answer questions about Lockstep, repeat text, find values in a text, call tools, write
+ small JSON objects and count.
What can you do?
How can you help me?
What are your skills?
What are you able to do?
List your abilities.
What can I ask you?
What kind of things can you do?

= Lockstep has four kinds of processes: the gateway, the scheduler, the rank workers and the cache
+ store.
What processes does Lockstep have?
Which processes make up Lockstep?
List the processes of Lockstep.
What are the parts of Lockstep?
Name the processes in Lockstep.
How many kinds of processes does Lockstep have?
Which kinds of processes does Lockstep have?

= The gateway speaks HTTP with the clients: it tokenizes prompts, sends them to the scheduler and
+ streams the text back.
What is the gateway?
What does the gateway do?
Explain the gateway.
Tell me about the gateway.
Describe the job of the gateway.
What is the role of the gateway?
Can you explain what the gateway does?

= The scheduler decides every step: it chooses which sequences run and sends each rank the same
+ step plan.
What is the scheduler?
What does the scheduler do?
Explain the scheduler.
Tell me about the scheduler.
Describe the job of the scheduler.
What is the role of the scheduler?
Can you explain what the scheduler does?

= A rank worker runs on one device, holds its shard of the weights and executes step plans in order.
What is a rank worker?
What does a rank worker do?
Explain the rank worker.
Tell me about rank workers.
Describe the job of a rank worker.
What is the role of a rank worker?
Can you explain what a rank worker does?

= The cache store owns the KV blocks on the SSD of its host and keeps their files, index and
+ integrity.
What is the cache store?
What does the cache store do?
Explain the cache store.
Tell me about the cache store.
Describe the job of the cache store.
What is the role of the cache store?
Can you explain what the cache store does?

= The scheduler decides every step, and the ranks only obey.
Who decides what runs next?
Which process makes the decisions?
Who makes the decisions in Lockstep?
Who decides every step?
Which process decides the next step?
What process is in charge of every decision?
Which process decides what runs?

= No, a rank never decides anything: it never ends, adds, drops or reorders a sequence on its own.
Do ranks decide anything?
Can a rank decide something?
Does a rank make decisions?
May a rank end a sequence on its own?
Can ranks make decisions of their own?
Do rank workers hold any policy?
Does a rank ever decide anything?

= Orders travel as msgpack messages over ZeroMQ.
How do orders travel?
How do the processes talk to each other?
What do the processes use to send messages?
Which messages does Lockstep use between processes?
How are messages sent in Lockstep?
What carries the orders in Lockstep?
How do processes exchange messages?

= Tensors travel by collectives: JACCL over Thunderbolt RDMA, ring over TCP, or NCCL on NVIDIA GPUs.
How do tensors travel?
How are tensors exchanged between ranks?
How do tensors move from rank to rank?
How does a tensor get to another rank?
What carries the tensors in Lockstep?
How do ranks share tensors?
Which way do tensors go between ranks?
What moves tensors between the ranks?
How do tensors get from one rank to another?

= The messages are msgpack frames whose payloads are typed structs, validated on arrival.
What is the wire format?
Which format do messages have?
What format is used on the wire?
How are messages encoded?
What do messages look like on the wire?
How is a message packed?
Which wire format do the messages use?

= JACCL is the collective backend for Macs that are linked by Thunderbolt RDMA.
What is JACCL?
What does JACCL do?
Explain JACCL.
Tell me about JACCL.
When is JACCL used?
What is JACCL used for?
Can you explain what JACCL is?

= The ring backend runs collectives over TCP and needs no special hardware, so it serves tests and
+ plain Linux machines.
What is the ring backend?
What does the ring backend do?
Explain the ring backend.
Tell me about the ring backend.
When is the ring backend used?
What is ring used for?
Can you explain what the ring backend is?

= NCCL is the collective backend for NVIDIA GPUs on Linux.
What is NCCL?
What does NCCL do?
Explain NCCL.
Tell me about NCCL.
When is NCCL used?
What is NCCL used for?
Can you explain what NCCL is?

= MLX is the array framework that the rank workers use to run the model.
What is MLX?
What does MLX do?
Explain MLX.
Tell me about MLX.
Why does Lockstep use MLX?
What is MLX used for?
Can you explain what MLX is?

= The gateway is built with aiohttp.
What is the gateway built with?
Which HTTP library does the gateway use?
What web framework does the gateway use?
Which library serves HTTP in the gateway?
What is used to serve HTTP?
With what is the gateway built?

= Only the rank workers import MLX; no other process knows about tensors.
Which process uses MLX?
Who imports MLX?
Which processes import MLX?
What part of Lockstep uses MLX?
Where is MLX used?
Which process may import MLX?

= The core of the scheduler is pure: it does no I/O, reads no clock and draws no random numbers.
Why is the scheduler called pure?
What is a pure core?
What does pure core mean?
Is the core of the scheduler pure?
Explain the pure core of the scheduler.
Does the scheduler core do any I/O?
What does it mean that the scheduler has a pure core?

= A step plan is a numbered message in which the scheduler tells every rank exactly what to run in
+ one step.
What is a step plan?
What does a step plan do?
Explain step plans.
Tell me about the step plan.
Define step plan.
What does step plan mean?
Can you explain what a step plan is?

= A step plan names the admitted sequences, the prefill chunks, the decodes, the dropped sequences
+ and the blocks to keep or evict.
What is in a step plan?
What does a step plan contain?
What does a step plan include?
What information does a step plan hold?
List the content of a step plan.
Which things does a step plan name?
What is written in a step plan?
What are the contents of a step plan?
What does a step plan hold?

= A receipt is the answer of a rank to a step plan; it carries the digest and the timings of the
+ step.
What is a receipt?
What does a receipt do?
Explain receipts.
Tell me about the receipt.
Define receipt.
What does receipt mean?
Can you explain what a receipt is?

= A digest is a short hash of the plan, the slots and the sampled tokens, which proves that all
+ ranks did the same step.
What is a digest?
What does a digest do?
Explain digests.
Tell me about the digest.
Define digest.
What does digest mean?
Can you explain what a digest is?

= If two digests differ, the scheduler sends no token, ends the epoch and leaves an evidence file.
What happens if digests differ?
What if two ranks send different digests?
What happens when the digests are not equal?
What does Lockstep do when digests differ?
What if a digest is wrong?
What follows when two digests do not match?
What happens when digests differ?

= An epoch is one life of the world: when a rank fails, the epoch ends and a new one begins.
What is an epoch?
What does an epoch do?
Explain epochs.
Tell me about the epoch.
Define epoch.
What does epoch mean?
Can you explain what an epoch is?

= Prefill is the work of reading a prompt into the KV cache, done in chunks.
What is prefill?
What does prefill do?
Explain prefill.
Tell me about prefill.
Define prefill.
What does prefill mean?
Can you explain what prefill is?

= Decode is the step that produces one new token for every running sequence in one batch.
What is decode?
What does decode do?
Explain decode.
Tell me about decode.
Define decode.
What does decode mean?
Can you explain what decode is?

= A slot is the row of a sequence in the running batch.
What is a slot?
What does a slot do?
Explain slots.
Tell me about the slot.
Define slot.
What does slot mean?
Can you explain what a slot is?

= To preempt a sequence means to take it out of the running batch for a while so that others can
+ go on.
What is preemption?
What does it mean to preempt a sequence?
Explain preempt.
Tell me about preemption.
Define preempt.
What does preempt mean?
Can you explain what preempting is?

= To drain means to finish the running requests while new ones are refused.
What is draining?
What does it mean to drain a server?
Explain drain.
Tell me about draining.
Define drain.
What does drain mean?
Can you explain what draining is?

= To spill means to write KV blocks from memory to the SSD.
What is spilling?
What does it mean to spill blocks?
Explain spill.
Tell me about spilling.
Define spill.
What does spill mean?
Can you explain what spilling is?

= To restore means to read KV blocks from the SSD back into memory, so that a known prefix is not
+ computed again.
What is restoring?
What does it mean to restore blocks?
Explain restore.
Tell me about restoring.
Define restore.
What does restore mean?
Can you explain what restoring is?

= A KV block holds the keys and values of 256 consecutive tokens of one sequence.
What is a KV block?
What does a KV block hold?
Explain KV blocks.
Tell me about KV blocks.
Define KV block.
What does KV block mean?
Can you explain what a KV block is?
"""
