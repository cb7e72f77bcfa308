"""Ray: starting it, putting workers into processes, and calling them with a deadline. The one package that imports ray.

environment   variables of a worker's process
session       starting Ray, and stopping it with all that it started
search_path   where workers look for modules
daemons       whether Ray's own processes live
workers       the handle to a worker, whose methods are called by reference
pulse         how a worker says that it lives
placement     on which node each worker goes, reserved before any starts
watching      listening to all workers, and ending those that fell silent
waiting       waiting for answers, and finding out what a failure meant
objects       values in Ray's store, and answers that are made when somebody fetches them
background    work in a thread of the driver
"""

from opd.cluster.background import Background
from opd.cluster.environment import FEW_ARENAS, KEEPS_SOME_MEMORY, worker_env
from opd.cluster.errors import LostValue, WorkerDied
from opd.cluster.objects import Remote, Stored, copy_on, fetch, put
from opd.cluster.placement import Group, Node, Seat, nodes, reserve
from opd.cluster.session import LOCAL, ray_session
from opd.cluster.waiting import first, wait
from opd.cluster.workers import Pending, Worker, spawn

__all__ = [
    "FEW_ARENAS",
    "KEEPS_SOME_MEMORY",
    "LOCAL",
    "Background",
    "Group",
    "LostValue",
    "Node",
    "Pending",
    "Remote",
    "Seat",
    "Stored",
    "Worker",
    "WorkerDied",
    "copy_on",
    "fetch",
    "first",
    "nodes",
    "put",
    "ray_session",
    "reserve",
    "spawn",
    "wait",
    "worker_env",
]
