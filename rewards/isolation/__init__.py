"""Worker processes for work that may hang, crash or use much memory; they are killed at a deadline.

>>> from rewards.isolation import Task, shared_pool
>>> [fine, hanging] = shared_pool().run([Task("math:sqrt", (2.25,)), Task("time:sleep", (60,))], deadline=0.2)
>>> fine.value, hanging.status
(1.5, 'timeout')
"""

from rewards.isolation.cache import content_key, forget, recall, remember
from rewards.isolation.component import IsolatedComponent
from rewards.isolation.pool import Outcome, Pool, Task, shared_pool

__all__ = ["IsolatedComponent", "Outcome", "Pool", "Task", "content_key", "forget", "recall", "remember", "shared_pool"]
