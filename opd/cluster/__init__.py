"""Ray: starting it, putting workers into processes, and calling them with a deadline. The one package that imports ray.

environment   the environment variables of a worker's process
session       starts Ray, and stops it with all that it started
search_path   where workers look for modules
daemons       whether Ray's own processes live
workers       the handle to a worker, through which its methods are called
pulse         how a worker says that it lives
placement     on which node each worker goes; reserved before any worker starts
watching      listens to all workers, and kills those that fell silent
waiting       waits for answers, and finds out what a failure means
objects       values in Ray's object store, and calls that are made when somebody fetches the answer
background    calls in a thread of the driver
errors        our errors for a worker or a value that is gone, made from Ray's
"""

from opd.cluster.background import BackgroundCall
from opd.cluster.environment import FEW_ARENAS, KEEPS_SOME_MEMORY, worker_env
from opd.cluster.errors import LostValue, WorkerDied
from opd.cluster.objects import RemoteCall, StoredValue, copy_on, fetch_object, put_object
from opd.cluster.placement import Node, Seat, SeatedWorker, WorkerGroup, list_nodes, reserve_seats
from opd.cluster.session import LOCAL, ray_session
from opd.cluster.waiting import wait_first, wait_for_all
from opd.cluster.workers import Pending, Worker, spawn_worker

__all__ = [
    "FEW_ARENAS",
    "KEEPS_SOME_MEMORY",
    "LOCAL",
    "BackgroundCall",
    "LostValue",
    "Node",
    "Pending",
    "RemoteCall",
    "Seat",
    "SeatedWorker",
    "StoredValue",
    "Worker",
    "WorkerDied",
    "WorkerGroup",
    "copy_on",
    "fetch_object",
    "list_nodes",
    "put_object",
    "ray_session",
    "reserve_seats",
    "spawn_worker",
    "wait_first",
    "wait_for_all",
    "worker_env",
]
