package httphead

import "strings"

// Values of gen_ai.operation.name.
const (
	opChat       = "chat"
	opCompletion = "text_completion"
	opEmbeddings = "embeddings"
	opGenerate   = "generate_content"
)

// llmSuffixes are paths of LLM APIs that stay recognizable behind a prefix under
// which a gateway mounts them.
var llmSuffixes = []struct{ path, operation string }{
	{"/chat/completions", opChat}, // OpenAI, with /v1, /v3 or a deployment's name before it
	{"/v1/responses", opChat},
	{"/v1/messages", opChat}, // Anthropic
	{"/api/chat", opChat},    // Ollama
	{"/v1/completions", opCompletion},
	{"/api/generate", opCompletion},
	{"/v1/embeddings", opEmbeddings},
	{"/api/embed", opEmbeddings},
	{"/api/embeddings", opEmbeddings},
}

// llmPaths are paths too common to be recognized behind a prefix.
var llmPaths = map[string]string{
	"/completion":      opCompletion, // llama.cpp
	"/completions":     opCompletion,
	"/generate":        opCompletion, // text-generation-inference
	"/generate_stream": opCompletion,
	"/embedding":       opEmbeddings,
	"/embeddings":      opEmbeddings,
}

// GenAIOperation returns gen_ai.operation.name for the path of an LLM API, ""
// for any other path.
func GenAIOperation(path string) string {
	path = strings.TrimRight(path, "/")
	if op, ok := llmPaths[path]; ok {
		return op
	}
	for _, s := range llmSuffixes {
		if strings.HasSuffix(path, s.path) {
			return s.operation
		}
	}
	// Open inference protocol: /v2/models/NAME[/versions/V]/infer
	if _, model, ok := strings.Cut(path, "/v2/models/"); ok {
		parts := strings.Split(model, "/")
		if len(parts) == 2 || len(parts) == 4 && parts[1] == "versions" {
			switch parts[len(parts)-1] {
			case "infer", "generate", "generate_stream":
				return opGenerate
			}
		}
	}
	return ""
}

// IsLLMPath tells whether path belongs to an LLM API.
func IsLLMPath(path string) bool { return GenAIOperation(path) != "" }
