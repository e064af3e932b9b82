"""Prefill layers and decode graphs side by side on one GPU.

An engine that keeps its own scheduler, cache and model needs of this room only the `Interleaver`
and a device for it. It hands over callables that launch kernels on torch's current stream; the
interleaver says where they run, keeps the two lanes off each other's SMs while the split changes,
and tells by polled events what is over:

>>> from smkern.runtime import Interleaver, SimDevice, Work
>>> lanes = Interleaver(SimDevice(132, (32, 64)))     # on a GPU: CudaDevice(ladder)
>>> def decode_step(place):                           # on a GPU: graphs[place.rung].replay()
...     log.append(f"decode on {place.num_sms}")
>>> def layers(first, count):                         # on a GPU: model.layer(i) of each, in place
...     return lambda place: log.append(f"layers {first}..{first + count - 1} on {place.num_sms}")
>>> log, steps, launched, done, group = [], 0, 0, 0, 2
>>> while steps < 3 or done < 8:                      # three steps of some, eight layers of another
...     lanes.aim(64 if steps < 3 else None)          # decode's SMs; None: all, for what is left
...     if steps < 3 and not lanes.queued("decode") and lanes.can_launch("decode"):
...         work = Work("decode", decode_step, about={"us": 900.0})
...         _ = lanes.launch("decode", work)          # first of the two: a token is due
...     if launched < 8 and lanes.queued("prefill") < 2:
...         work = Work("prefill", layers(launched, group), launches=24, about={"us": 1500.0})
...         if lanes.can_launch("prefill", work):     # one group runs, one waits behind it
...             _, launched = lanes.launch("prefill", work), launched + group
...     lanes.wait()                                  # until something may be over
...     for ticket in lanes.poll():                   # here tokens are read, requests leave or join
...         if ticket.lane == "decode":
...             steps += 1
...         else:
...             done += group
>>> print(*log, sep="\\n")
decode on 64
layers 0..1 on 68
decode on 64
layers 2..3 on 68
layers 4..5 on 68
decode on 64
layers 6..7 on 132

The last two layers moved to the whole device at the first boundary at which nothing decoded. What
the interleaver expects of an engine:

- `run(place)` launches and returns. It reads nothing back: host memory that a launch fills is read
  once its ticket `is_over`.
- The decode lane is one ordinary stream with the whole device. Work for a side of a split comes as
  a graph captured on `ladder.split(decode=rung).decode`, where it runs whatever stream launches it;
  one graph a rung, and one of an ordinary stream for `place.rung == 0`.
- The prefill lane launches on the stream of its partition; `smkern.current_num_sms()` and every
  operator see that. When it moves, the new stream waits for the lane's last launch on the device.
- What outlives a launch (the residual stream between two layers, a graph's inputs) is allocated
  outside of it, since torch's allocator keeps memory by stream and a lane changes its stream.
- Two works of a lane never run at the same time; two works of different lanes do, so they share no
  buffer, and pages of a cache change hands when the ticket of their last reader `is_over`.
- `Work.launches` is how many kernels a work puts into the stream's queue: the driver blocks the
  caller near 1024, so `can_launch` says no before, except on an empty lane.
- What `run` raises comes out of `launch`; there is no ticket then, but part of it may be on the
  device. Take `fence = lanes.fence(lane)`: once `fence.query()` is True, its buffers are free.
- What the device reports comes out of `poll` as DeviceError, and `abandon` gives the launches that
  are lost.
"""

from __future__ import annotations

from smkern.lazy import attach_stub

# The interleaver, the simulated device and the timeline load no torch.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
