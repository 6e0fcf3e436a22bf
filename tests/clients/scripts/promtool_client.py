"""python promtool_client.py METRICS_URL ..."""

import subprocess
import sys
import urllib.request

for url in sys.argv[1:]:
    with urllib.request.urlopen(url, timeout=10) as page:  # noqa: S310 - our own servers'
        done = subprocess.run(["promtool", "check", "metrics"], input=page.read(), capture_output=True)
    assert done.returncode != 1, f"{url}: {done.stderr.decode()}"  # 3: names that a linter would choose otherwise
