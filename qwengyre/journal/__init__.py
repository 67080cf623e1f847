"""The only durable truth: append, read, replay. One writer per journal; what is appended is never changed.

`append` hands a record to the operating system, `wait_durable` waits until the sync policy holds, `read` replays.
"""

from qwengyre.journal.journal import Journal, SyncPolicy, is_in_use
from qwengyre.journal.reader import Cut, read

__all__ = ["Cut", "Journal", "SyncPolicy", "is_in_use", "read"]
