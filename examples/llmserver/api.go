package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const (
	modelName       = "tiny-experts"
	maxBody         = 1 << 20 // bytes of a request
	maxPromptTokens = 4096
	maxTokens       = 4096
	maxTopLogprobs  = 20 // as in the OpenAI API
)

// api serves the part of the OpenAI API that a chat client needs.
type api struct {
	model   *model
	slot    *slotFile
	started time.Time
	tracer  trace.Tracer
	serial  atomic.Uint64
}

func newAPI(m *model, slot *slotFile) *api {
	return &api{
		model: m, slot: slot, started: time.Now(),
		tracer: otel.Tracer("github.com/ebpfllm/ebpfllm/examples/llmserver"),
	}
}

func (a *api) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintln(w, `{"status":"ok"}`)
	})
	mux.HandleFunc("GET /v1/models", a.models)
	mux.HandleFunc("POST /v1/chat/completions", a.chat)
	return mux
}

func (a *api) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"object": "list",
		"data":   []any{map[string]any{"id": modelName, "object": "model", "created": a.started.Unix(), "owned_by": "ebpfllm"}},
	})
}

type chatRequest struct {
	Model    string `json:"model"`
	Messages []struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	} `json:"messages"`
	MaxTokens     *int `json:"max_tokens"`
	Stream        bool `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Logprobs    bool `json:"logprobs"`
	TopLogprobs int  `json:"top_logprobs"`
}

// prompt returns the words of all messages.
func (q *chatRequest) prompt() []string {
	var words []string
	for _, m := range q.Messages {
		words = append(words, m.Role)
		words = append(words, strings.Fields(m.Content)...)
	}
	return words
}

// chat answers POST /v1/chat/completions.
func (a *api) chat(w http.ResponseWriter, r *http.Request) {
	var q chatRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&q); err != nil {
		status := http.StatusBadRequest
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			status = http.StatusRequestEntityTooLarge
		}
		writeError(w, status, "request body: "+err.Error())
		return
	}
	prompt, tokens := q.prompt(), 16
	if q.MaxTokens != nil {
		tokens = *q.MaxTokens
	}
	switch {
	case len(q.Messages) == 0:
		writeError(w, http.StatusBadRequest, "messages: must not be empty")
		return
	case len(prompt) > maxPromptTokens:
		writeError(w, http.StatusBadRequest, fmt.Sprintf("messages: %d words, at most %d", len(prompt), maxPromptTokens))
		return
	case tokens < 1 || tokens > maxTokens:
		writeError(w, http.StatusBadRequest, fmt.Sprintf("max_tokens: must be between 1 and %d", maxTokens))
		return
	case q.TopLogprobs < 0 || q.TopLogprobs > maxTopLogprobs || q.TopLogprobs > 0 && !q.Logprobs:
		writeError(w, http.StatusBadRequest, fmt.Sprintf("top_logprobs: must be between 0 and %d, and needs logprobs", maxTopLogprobs))
		return
	}
	trace.SpanFromContext(r.Context()).SetAttributes(
		attribute.String("gen_ai.operation.name", "chat"),
		attribute.String("gen_ai.request.model", modelName),
		attribute.Int("gen_ai.usage.input_tokens", len(prompt)),
		attribute.Int("gen_ai.usage.output_tokens", tokens))

	var s state
	if err := a.prefill(r.Context(), &s, prompt); err != nil {
		slog.Error("save state", "error", err)
		writeError(w, http.StatusInternalServerError, "cannot save the sequence's state")
		return
	}
	answer := newAnswer(&q, fmt.Sprintf("chatcmpl-%d", a.serial.Add(1)), time.Now(), len(prompt), tokens)
	if q.Stream {
		a.stream(w, r, &s, answer)
		return
	}
	a.decode(r.Context(), &s, tokens, answer.add)
	writeJSON(w, http.StatusOK, answer.whole())
}

// prefill feeds the prompt to the model and saves the state it leads to.
func (a *api) prefill(ctx context.Context, s *state, prompt []string) error {
	_, span := a.tracer.Start(ctx, "prefill")
	for _, word := range prompt {
		a.model.forward(s, word)
	}
	span.End()
	_, span = a.tracer.Start(ctx, "save state")
	defer span.End()
	return a.slot.save(s)
}

// decode makes tokens one after the other and hands each to emit, until emit
// fails or the client is gone.
func (a *api) decode(ctx context.Context, s *state, tokens int, emit func([]candidate) error) {
	ctx, span := a.tracer.Start(ctx, "decode")
	defer span.End()
	for range tokens {
		ranked := s.candidates()
		if err := emit(ranked); err != nil {
			span.RecordError(err)
			return
		}
		if ctx.Err() != nil {
			return
		}
		a.model.forward(s, ranked[0].token)
	}
}

// stream sends each token as an event of its own as soon as it is made.
func (a *api) stream(w http.ResponseWriter, r *http.Request, s *state, answer *answer) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	flusher := http.NewResponseController(w)
	event := func(v any) error {
		data, err := json.Marshal(v)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil {
			return err
		}
		return flusher.Flush()
	}
	a.decode(r.Context(), s, answer.tokens, func(ranked []candidate) error {
		return event(answer.chunk(ranked))
	})
	if err := event(answer.last()); err != nil {
		return // the client has gone; nobody is left to tell
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		slog.Debug("write response", "error", err)
	}
}

func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": message, "type": "invalid_request_error"}})
}
