"""Worker processes that can be killed, for work that may hang, crash or use much memory.

>>> from rewards.isolation import Task, shared_pool
>>> [fine, hanging] = shared_pool().run([Task("math:sqrt", (2.25,)), Task("time:sleep", (60,))], deadline=0.2)
>>> fine.value, hanging.status
(1.5, 'timeout')
"""

from rewards.isolation.cache import Cache, clear_recent, content_key
from rewards.isolation.component import IsolatedComponent
from rewards.isolation.pool import Outcome, Pool, Task, shared_pool

__all__ = [
    "Cache",
    "IsolatedComponent",
    "Outcome",
    "Pool",
    "Task",
    "clear_recent",
    "content_key",
    "shared_pool",
]
