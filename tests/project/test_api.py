"""The public API, so that it does not change by accident."""

import ast
import subprocess
import sys
from pathlib import Path

import arr_coc

SOURCE = Path(arr_coc.__file__).parent
PUBLIC = {
    "CHANNELS": "mappingproxy",
    "ARRCOCConfig": "(*, hidden_size, channels, rank, budget, min_tokens, max_tokens, gestalt_tokens, "
    "cell_pixels, max_image_pixels, text_detector, base_model_name_or_path, base_model_edition, compressor_levels, "
    "introspect, seed, arr_coc_version)",
    "ARRCOCLayer": "(config, text_detector)",
    "ARRCOCOutput": "(tokens, indices, mask, budgets, num_kept, expected_tokens, relevance, scores, weights, "
    "tensions, strategy, reason, texture, word_pull, voice)",
    "ARRCOCQwen": "(model, processor, selector, *, mode, budget, query_layers, on_error, gaze, graphs, introspect, "
    "looks)",
    "Answer": "(text, outputs, kept, tokens, strategy, reason, timings_ms, words, budget, failure, mode, looks)",
    "Attachment": "(model, selector, settings)",
    "ChatTokens": "(start, end, user, newline)",
    "EncodingCache": "(limit_bytes)",
    "Gaze": "(*, gestalt, overlap, fixation, order, compress)",
    "LanguageSelector": "()",
    "Look": "(tokens, seen, sure, then, kept)",
    "Looks": "(*, rounds, sure)",
    "PictureSelector": "()",
    "Prepared": "(arguments, run, model)",
    "PreviousFrame": "(picture, relevance, age, fixations)",
    "Selection": "(indices, features, deepstack, gate, output, order)",
    "TokenSelector": "()",
    "VisualQuery": "(tokens, grid, words, cells, picture, attention_reader, key_reader, deepstack, attended, details, "
    "leeway)",
    "__version__": "str",
    "attach": "(model, selector, *, mode, budget, query_layers, chat, processor, on_error, gaze, encoded, full_logits, "
    "graphs, introspect, looks)",
    "collate_prepared": "(items)",
    "create_selector": "(name, **kwargs)",
    "detach": "(model)",
    "encode": "(model, inputs, selector)",
    "generate_texture_array": "(image, grid, channels, *, previous, semantic, text_detector, gestalt_tokens, "
    "cell_pixels, check_values)",
    "list_families": "()",
    "list_selectors": "()",
    "load_processor": "(directory_or_id, **hub)",
    "patches_from_picture": "(picture, *, patch_size, merge_size, temporal_patch_size, image_mean, image_std)",
    "picture_from_patches": "(pixel_values, grid_thw, *, patch_size, merge_size, temporal_patch_size, image_mean, "
    "image_std)",
    "prepare": "(model, inputs, selector, *, mode, budget, query, query_layers, chat, processor, on_error, images, "
    "gaze, encoded, introspect)",
    "register_selector": "(name)",
}


def describe(value):
    if not callable(value):
        return type(value).__name__
    import inspect

    shown, seen_star = [], False
    for name, parameter in inspect.signature(value).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            shown.append("*")
            seen_star = True
        shown.append(
            {parameter.VAR_KEYWORD: f"**{name}", parameter.VAR_POSITIONAL: f"*{name}"}.get(parameter.kind, name)
        )
    return f"({', '.join(shown)})"


def test_the_public_api_is_exactly_this():
    assert {name: describe(getattr(arr_coc, name)) for name in arr_coc.__all__} == PUBLIC


def test_every_public_name_has_a_docstring_with_an_example():
    without_example = {"ARRCOCOutput", "Answer", "Attachment", "Look", "Selection"}
    without_example |= {"LanguageSelector", "PictureSelector", "TokenSelector"}
    for name in arr_coc.__all__:
        if callable(getattr(arr_coc, name)):
            text = getattr(arr_coc, name).__doc__
            assert text, name
            assert (">>>" in text) == (name not in without_example), name


def modules():
    """Every module of the package by its dotted name without the package's."""
    paths = (path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in paths}


def test_import_loads_no_model_library_and_help_not_even_torch():
    code = (
        "import sys; import {}; "
        "print([name for name in ('transformers', 'torch', 'matplotlib', 'kornia') if name in sys.modules])"
    )
    for module, loaded in (("arr_coc.cli", "[]"), ("arr_coc.realizing", "['torch']")):
        result = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == loaded


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_no_source_file_asserts_or_unpickles():
    for path in modules().values():
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], path
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "pickle" not in names
        assert "torch.load" not in path.read_text()
