"""Pictures for people: overlays, the contact sheet, the homunculus, charts. Drawn with Pillow or as SVG."""
