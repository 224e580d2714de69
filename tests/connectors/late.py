"""Queues beside the main one whose work is done as late as it may be: when somebody waits, or by chance."""

from __future__ import annotations

import random
import threading

from frame.interfaces import Mark, SideQueue
from frame.plugins.platforms.cpu import HostStreams


class LateMark(Mark):
    def __init__(self, queue):
        self.queue, self.number = queue, queue.num_given

    def done(self):
        if self.queue.num_done < self.number and self.queue.draw.random() < self.queue.share:
            self.queue.work_off(self.queue.num_done + 1)
        return self.queue.num_done >= self.number

    def wait(self):
        self.queue.work_off(self.number)


class LateQueue(SideQueue):
    """Any thread may ask for work to be done: it is done in order, and a mark is passed once all before it is over."""

    def __init__(self, draw, share):
        self.draw, self.share = draw, share
        self.work, self.num_given, self.num_done = [], 0, 0
        self.lock = threading.RLock()

    def run(self, work):
        with self.lock:
            self.work.append(work)
            self.num_given += 1

    def work_off(self, number):
        with self.lock:
            while self.num_done < number:
                self.work.pop(0)()
                self.num_done += 1

    def join(self):
        self.work_off(self.num_given)

    def mark(self):
        return LateMark(self)


class LateStreams(HostStreams):
    """`share`: by what chance a question whether work is done has one piece of it done."""

    def __init__(self, share=0.3, seed=0):
        self.draw, self.share = random.Random(seed), share

    def side_queue(self):
        return LateQueue(self.draw, self.share)
