"""What this package offers. Runs for `frame --help` too, so it imports nothing heavy."""

from frame import Provider, hookimpl

API = ">=0.2.dev1,<0.3"


@hookimpl
def frame_platforms() -> list[Provider]:
    # its preference is below the defaults', so `auto` does not choose it
    return [Provider("example-cpu", "frame_example.platform:ExampleCpu", api=API, preference=-10)]


@hookimpl
def frame_attention_backends() -> list[Provider]:
    return [Provider("example-plain", "frame_example.attention:PlainAttention", api=API, preference=-10)]


@hookimpl
def frame_models() -> list[Provider]:
    # the name is the architecture in config.json; the tag lets `frame plugins check` make a checkpoint to test with
    tags = {"tiny": "frame_example.checkpoint:write_checkpoint"}
    return [Provider("ExampleForCausalLM", "frame_example.model:ExampleForCausalLM", api=API, tags=tags)]


@hookimpl
def frame_kv_connectors() -> list[Provider]:
    return [
        Provider(
            "example-memory",
            "frame_example.connector:MemoryScheduler",
            api=API,
            summary="prompt blocks in host memory",
            options="frame_example.connector:MemoryOptions",
            # "stores" says for `frame plugins check` that another engine cannot find these blocks
            tags={"worker": "frame_example.connector:MemoryWorker", "stores": "no"},
        )
    ]


@hookimpl
def frame_logits_processors() -> list[Provider]:
    # the tag is what a request brings to opt in, for `frame plugins check`
    tags = {"extra_args": '{"example_avoid": [3, 4]}'}
    return [Provider("example-avoid", "frame_example.processor:AvoidTokens", api=API, tags=tags)]


@hookimpl
def frame_endpoints() -> list[Provider]:
    # the tag is a body that must be answered, for `frame plugins check`
    tags = {"bodies": '{"/example/continue": {"prompt": "hello", "max_tokens": 2}}'}
    return [Provider("example-continue", "frame_example.endpoint:ContinueEndpoint", api=API, tags=tags)]


@hookimpl
def frame_commands() -> list[Provider]:
    return [Provider("example-hello", "frame_example.command:HelloCommand", api=API, summary="Greets a plugin author.")]
