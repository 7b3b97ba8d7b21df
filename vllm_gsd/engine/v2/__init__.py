"""Token graphs on vLLM's Model Runner V2, whose host does not wait for the device.

The words of this package:

- *Slot*: a request's line in vLLM's request states, which it keeps until it ends or is preempted. A slot of the KV
  cache is always called a KV slot.
- *Place*: a request's index in the batch of a step.
- *Draft phase*: what the device does between two target forwards, from catching up to flattening. Its graphs are
  *proposals*, by slot, and *fresh* if they are for the request that has the slot now.
- *Known*: what the host knows about a batch before it learns which tokens were accepted, and sends to a draft phase.
- *Plan*: what is decided before the graphs exist: the *kind* of graph that each request gets (drafted, copies only, or
  none), the levels of the phase, and each request's *share*, the most nodes of its graph that are verified.
- *Late*: copied to the host while the next step runs; the host learns from it a step or two later.
"""
