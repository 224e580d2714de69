from frame.testing import EndpointSuite
from tests.contract.installed import classes

MESSAGES = [{"role": "user", "content": "hello"}]

globals().update(
    classes(
        EndpointSuite,
        **{
            "completions": {"bodies": {"/v1/completions": {"model": "test-model", "prompt": "hello", "max_tokens": 4}}},
            "chat-completions": {
                "bodies": {"/v1/chat/completions": {"model": "test-model", "messages": MESSAGES, "stream": True}}
            },
            "responses": {
                "bodies": {"/v1/responses": {"input": "hello"}, "/v1/responses/input_tokens": {"input": "a"}}
            },
            "messages": {
                "bodies": {
                    "/v1/messages": {"model": "test-model", "messages": MESSAGES, "max_tokens": 5},
                    "/v1/messages/count_tokens": {"messages": MESSAGES},
                }
            },
            "embeddings": {"bodies": {"/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"}}},
            "pooling": {"bodies": {"/pooling": {"input": [1, 2]}, "/classify": {"input": "a"}}},
            "score": {
                "bodies": {
                    "/score": {"text_1": "a", "text_2": ["b", "c"]},
                    "/v1/score": {"queries": "a", "documents": ["b"]},
                    "/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
                    "/v2/rerank": {"query": "a", "documents": ["b"]},
                }
            },
            "generate": {"bodies": {"/inference/v1/generate": {"token_ids": [104, 105]}}},
            "tokens": {"bodies": {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [104, 105]}}},
        },
    )
)
