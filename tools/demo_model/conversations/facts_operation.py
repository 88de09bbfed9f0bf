"""Facts about the operation and behaviour of Lockstep, in the format of facts.py."""

OPERATION = """
= The default block size is 256 tokens.
What is the default block size?
How big is a block by default?
How many tokens are in a block?
What block size does Lockstep use?
Which block size is the default?
How large is a KV block by default?

= The gateway listens on port 8080 by default.
What is the default port?
Which port does Lockstep use?
On which port does the gateway listen?
What port does the gateway listen on?
Which port is the default?
What is the port of the gateway by default?

= The default of decode_stall_ms is 150 milliseconds.
What is the default of decode_stall_ms?
How large is decode_stall_ms by default?
What value does decode_stall_ms have?
Which decode_stall_ms is the default?
How many milliseconds is decode_stall_ms?
What is decode_stall_ms set to by default?

= decode_stall_ms is the longest time in milliseconds that a prefill chunk may hold up the running
+ decodes.
What is decode_stall_ms?
What does decode_stall_ms do?
Explain decode_stall_ms.
Tell me about decode_stall_ms.
Could you explain decode_stall_ms?
Do you know what decode_stall_ms is?
What does decode_stall_ms mean?
What is decode_stall_ms for?
Can you explain what decode_stall_ms is?

= Run lockstep up to start Lockstep on one machine.
How do I start Lockstep?
Which command starts Lockstep?
How can I run Lockstep?
How is Lockstep started?
What command do I use to start Lockstep?
How do I launch Lockstep?
What do I type to start Lockstep?

= The command lockstep up starts all processes on one machine and restarts any that exits.
What does lockstep up do?
Explain lockstep up.
Tell me about lockstep up.
What is lockstep up?
What happens when I run lockstep up?
What is the command lockstep up for?

= The command lockstep status shows the processes, the epoch and the requests of a running Lockstep.
What does lockstep status do?
Explain lockstep status.
Tell me about lockstep status.
What is lockstep status?
What happens when I run lockstep status?
How do I see the state of Lockstep?
What is the command lockstep status for?

= Run make test to run the tests.
How do I run the tests?
Which command runs the tests?
How can I test Lockstep?
How are the tests run?
What command do I use to run the tests?
What do I type to run the tests?

= The command make up starts Lockstep with the demo model from the source tree.
What does make up do?
Explain make up.
Tell me about make up.
What is make up?
What happens when I run make up?
What is the command make up for?

= The command make test runs the tests of Lockstep.
What does make test do?
Explain make test.
Tell me about make test.
What is make test?
What happens when I run make test?
What is the command make test for?

= Yes, the gateway offers an API that is compatible with the OpenAI API.
Is Lockstep compatible with OpenAI?
Does Lockstep have an OpenAI API?
Can I use the OpenAI client with Lockstep?
Is the API compatible with the OpenAI API?
Does the gateway speak the OpenAI API?
Is the gateway OpenAI compatible?

= Send a POST request to /v1/chat/completions on the gateway.
How do I send a chat request?
Which endpoint is used for chat?
What is the path for chat completions?
Where do I send a chat message?
How can I chat with Lockstep over HTTP?
What endpoint do I use for chat?

= Lockstep runs on Apple-silicon Macs and on Linux machines with NVIDIA GPUs or CPUs.
Which machines does Lockstep run on?
What hardware does Lockstep support?
Where does Lockstep run?
On what machines can I run Lockstep?
What computers can Lockstep use?
Which hardware does Lockstep run on?

= Yes, Lockstep runs on Linux, with NCCL on NVIDIA GPUs or with the ring backend on CPUs.
Does Lockstep run on Linux?
Can I use Lockstep on Linux?
Is Linux supported?
Is it possible to use Linux?
Can it run on Linux?
Does Lockstep support Linux?
Can Lockstep run on a Linux machine?
Is it possible to run Lockstep on Linux?

= If a rank dies, the epoch ends, the ranks start again and the client sees a pause, not an error.
What happens if a rank dies?
What if a rank crashes?
What happens when a rank is killed?
What does Lockstep do when a rank dies?
What happens to my stream if a rank dies?
What if I kill a rank?
What follows when a rank dies?

= If the scheduler dies, the ranks exit and the gateways send their open requests again when it is
+ back.
What happens if the scheduler dies?
What if the scheduler crashes?
What happens when the scheduler is killed?
What does Lockstep do when the scheduler dies?
What if I kill the scheduler?
What follows when the scheduler dies?

= If the gateway dies, its clients lose their connections and the scheduler aborts what the
+ gateway owned.
What happens if the gateway dies?
What if the gateway crashes?
What happens when the gateway is killed?
What does Lockstep do when the gateway dies?
What if I kill the gateway?
What follows when the gateway dies?

= If a cache store dies, serving goes on without the SSD tier.
What happens if the cache store dies?
What if the cache store crashes?
What happens when the cache store is killed?
What does Lockstep do when the cache store dies?
What if I kill the cache store?
What follows when the cache store dies?

= Lockstep got its name because all ranks take the same steps in the same order.
Why is it called Lockstep?
Where does the name Lockstep come from?
Why does Lockstep have this name?
What does the name Lockstep mean?
Why was the name Lockstep chosen?
Why is Lockstep called Lockstep?

= There is exactly one scheduler.
How many schedulers are there?
How many schedulers does Lockstep have?
How many schedulers run at once?
Can there be two schedulers?
What is the number of schedulers?
How many schedulers does a cluster have?

= There is one rank worker per device.
How many rank workers are there?
How many rank workers does Lockstep have?
How many rank workers run on a device?
What is the number of rank workers?
How many ranks are there per device?
How many rank workers run per device?

= There is one cache store per host.
How many cache stores are there?
How many cache stores does Lockstep have?
How many cache stores run on a host?
What is the number of cache stores?
How many cache stores are there per host?
How many cache stores run per host?

= Tensor parallelism splits the weights of every layer over the ranks, so that all ranks work on
+ the same token.
What is tensor parallelism?
What does tensor parallelism do?
Explain tensor parallelism.
Tell me about tensor parallelism.
Define tensor parallelism.
What does tensor parallelism mean?
Can you explain what tensor parallelism is?

= The world is the set of ranks that run the model together in one epoch.
What is the world?
What does the world mean in Lockstep?
Explain the world.
Tell me about the world.
Define world.
What is a world in Lockstep?
Can you explain what the world is?

= Run-ahead means that the scheduler sends the next plan before the result of the last one is
+ back, so the device is never idle.
What is run-ahead?
What does run-ahead do?
Explain run-ahead.
Tell me about run-ahead.
Define run-ahead.
What does run-ahead mean?
Can you explain what run-ahead is?

= Speculative decoding verifies several draft tokens in one step and keeps those that the model
+ would have chosen.
What is speculative decoding?
What does speculative decoding do?
Explain speculative decoding.
Tell me about speculative decoding.
Define speculative decoding.
What does speculative decoding mean?
Can you explain what speculative decoding is?

= Rank 0 is the primary rank: it sends the sampled tokens to the scheduler.
What is the primary rank?
What does the primary rank do?
Explain the primary rank.
Tell me about rank 0.
Which rank is the primary rank?
What is rank 0?
Can you explain what the primary rank is?

= A prefix match means that the first tokens of a prompt are already in KV blocks, so they need no
+ prefill.
What is a prefix match?
What does a prefix match do?
Explain prefix matches.
Tell me about the prefix match.
Define prefix match.
What does prefix match mean?
Can you explain what a prefix match is?

= A block is found again by the chained hash of its tokens.
How is a block found again?
How are KV blocks found?
By what is a block found?
How does Lockstep find a block?
What identifies a KV block?
How is a stored block found?

= Every accepted request ends exactly once, and no token is sent twice or skipped.
How often does a request end?
What is promised for every request?
Can a token be sent twice?
Can a request end twice?
What does Lockstep promise for a request?
What is the promise for every accepted request?

= The finish reasons are stop, length, abort and error.
What finish reasons are there?
Which finish reasons does Lockstep know?
List the finish reasons.
What are the finish reasons?
Name the finish reasons.
Which finish reasons exist?

= The supervisor starts the processes again when they exit.
What is the supervisor?
What does the supervisor do?
Explain the supervisor.
Tell me about the supervisor.
What is the role of the supervisor?
Who restarts a process that exits?
Can you explain what the supervisor does?

= Run-time problems show up in lockstep status and in the logs of the processes.
Where do I find the logs?
Where can I see problems?
How do I find out what is wrong?
Where do problems show up?
Where should I look if something is broken?
Something is wrong. Where do I look?
Where can I look for errors?
How can I debug Lockstep?
Where do I look when something is wrong?
"""
