"""The harness of a paced run: ask the model, do as it says, end when it says so.

The model answers `on 3.250` (a tool runs: ask again 3.25 s after the start) or `end 6.500`. The start is when the instruction was written,
so what starting a process costs is inside. Nothing but the standard library, so that starting 48 at once costs little.
`python -m qwengyre.bench.paced_harness INSTRUCTION_FILE`.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from urllib.parse import urlsplit

TIMEOUT_S = 3600


def main() -> int:
    started = os.stat(sys.argv[1]).st_mtime
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    messages = [{"role": "user", "content": "Go on."}]
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=TIMEOUT_S)
    while True:
        connection.request(
            "POST", f"{base.path}/chat/completions", json.dumps({"model": "policy", "messages": messages}), headers
        )
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            print(body.decode(errors="replace"), file=sys.stderr)
            return 1
        said = json.loads(body)["choices"][0]["message"]["content"]
        verb, until_s = said.split()
        time.sleep(max(0.0, started + float(until_s) - time.time()))
        if verb == "end":
            return 0
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


if __name__ == "__main__":
    sys.exit(main())
