"""Draw the page for README and docs: python docs/images/shoot.py (make screenshots)."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from serving import serve  # noqa: E402


def save(page: Page, name: str, height: int) -> None:
    """A part of the page from its top, as a small file."""
    page.wait_for_timeout(800)
    shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": height})
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    picture.save(HERE / name, quality=88, optimize=True)
    print(HERE / name, picture.size)


def save_part(page: Page, part: str, name: str) -> None:
    """One element of the page, as a small file."""
    page.wait_for_timeout(800)
    picture = Image.open(io.BytesIO(page.locator(part).screenshot())).convert("RGB")
    picture.save(HERE / name, quality=88, optimize=True)
    print(HERE / name, picture.size)


def main() -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("no browser is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (address, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{address}?__theme=light")
        page.get_by_role("button", name="needle").first.click()
        page.locator("#stats .difference").wait_for()
        page.get_by_role("button", name="needle").first.click()  # the first time is of a page that just started
        page.wait_for_timeout(500)
        page.locator("#stats .difference").wait_for()
        page.get_by_role("radio", name="merge", exact=True).check()
        page.get_by_role("button", name="Compare ARR, COC and both").click()
        page.locator("#ways figure").nth(2).wait_for()
        save_part(page, "#ways", "demo-ways.jpg")
        page.reload()
        page.get_by_role("button", name="camouflage").first.click()
        page.locator("#stats .difference").wait_for()
        page.get_by_role("radio", name="auto", exact=True).check()
        page.get_by_role("button", name="Ask", exact=True).click()
        page.locator("#looks .wide img").wait_for()
        page.locator("#stats .difference").wait_for()
        save(page, "demo-ask.jpg", 1990)
        page.get_by_role("button", name="scene").first.click()
        page.locator("#stats", has_text="35 of 140").wait_for()
        page.locator("#stats .difference").wait_for()
        page.get_by_role("tab", name="Microscope").click()
        picture = page.locator("#cells img")
        picture.wait_for()
        box = picture.bounding_box() or {"width": 0, "height": 0}
        picture.click(position={"x": box["width"] * 2.5 / 14, "y": box["height"] * 1.5 / 10})
        page.locator("#cell", has_text="row 2, column 3").wait_for()
        save(page, "demo-microscope.jpg", 1660)
        browser.close()


if __name__ == "__main__":
    main()
