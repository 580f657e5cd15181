"""Reads every built page in a headless browser: `python3 docs/check_pages.py [build/site]`, after `make docs`.

The browser opens one page that loads all others in a frame, at the width of a desk and of a phone. A page fails if it
logs an error, requests a file that is not there, shows a picture that did not load, or is wider than its frame. The
plan explorer is used as a person does (docs/explorer/visit.js).
Without a browser (chromium, chromium-browser, google-chrome; or CHROMIUM) one line says so, and nothing fails.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120
VISITS = {"/plan-explorer.html": Path(__file__).with_name("explorer") / "visit.js"}
FRAMES = """<!doctype html><title>pages</title><script>
const pages = PAGES, visits = {VISITS}, faults = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.body.append(frame);
  const note = what => faults.push(`${page} at ${width} pixels: ${what}`);
  const inside = frame.contentWindow;
  await loaded;
  inside.addEventListener("error", e => note(e.message));
  const root = frame.contentDocument.documentElement;
  await Promise.all([...frame.contentDocument.images].map(i => i.decode().catch(() => note(`no picture ${i.src}`))));
  if (root.scrollWidth > width + 1) note(`${root.scrollWidth} pixels wide`);
  if (!frame.contentDocument.querySelector("h1")) note("no heading");
  if (visits[page]) await visits[page](inside, note).catch(error => note(error.message));
  frame.remove();
}
onload = async () => {
  for (const page of pages) for (const width of [1280, 390]) await look(page, width);
  await fetch("/report", {method: "POST", body: JSON.stringify({pages: pages.length, faults})});
};
</script><body></body>"""


class Server(http.server.ThreadingHTTPServer):
    """Serves the pages. A browser may close a connection early; that is no error to show."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Site(http.server.SimpleHTTPRequestHandler):
    """The folder, the page with frames, and a place for the browser's report."""

    def __init__(self, *args: Any, owner: Check, **kwargs: Any) -> None:
        self.owner = owner
        super().__init__(*args, directory=str(owner.site), **kwargs)

    def do_GET(self) -> None:
        if self.path != "/frames":
            return super().do_GET()
        visits = ",".join(f"{json.dumps(page)}: {path.read_text()}" for page, path in VISITS.items())
        body = FRAMES.replace("VISITS", visits).replace("PAGES", json.dumps(self.owner.pages)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def do_POST(self) -> None:
        self.owner.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.owner.done.set()

    def log_message(self, *_: Any) -> None:
        """No line for each request."""

    def send_error(self, code: int, *args: Any, **kwargs: Any) -> None:
        if self.path != "/favicon.ico":
            self.owner.faults.append(f"{self.path}: {code}")
        super().send_error(code, *args, **kwargs)


class Check:
    """One visit of all pages."""

    def __init__(self, site: Path) -> None:
        self.site, self.done = site.resolve(), threading.Event()
        self.pages = sorted(f"/{p.relative_to(self.site)}" for p in self.site.rglob("*.html") if p.name != "404.html")
        self.faults: list[str] = []
        self.report: dict[str, Any] = {}

    def run(self, browser: str) -> list[str]:
        """Faults; empty if all is well."""
        server = Server(("127.0.0.1", 0), functools.partial(Site, owner=self))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, open(f"{profile}/log", "w+") as log:
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
            options += [f"--user-data-dir={profile}/user", "--enable-logging=stderr", "--window-size=1400,1000"]
            url = f"http://127.0.0.1:{server.server_port}/frames"
            process = subprocess.Popen([browser, *options, url], stdout=log, stderr=log)
            is_done = self.done.wait(SECONDS)
            process.terminate()
            process.wait()
            server.shutdown()
            log.seek(0)
            lines = log.read().splitlines()
        self.faults += [line.split("CONSOLE", 1)[1] for line in lines if "CONSOLE" in line]
        self.faults += self.report.get("faults", [])
        if not is_done:
            self.faults.append(f"the browser did not report within {SECONDS} s; its last lines: {lines[-5:]}")
        return self.faults


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")
    names = filter(None, (os.environ.get("CHROMIUM"), *BROWSERS))
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        print("pages are not looked at: no browser is here (apt-get install chromium, or set CHROMIUM)")
        return 0
    check = Check(site)
    faults = check.run(browser)
    print("\n".join(faults) or f"{len(check.pages)} pages: no console error, no missing file or picture")
    return 1 if faults or not check.pages else 0


if __name__ == "__main__":
    sys.exit(main())
