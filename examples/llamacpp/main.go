// Command llamacpp serves the OpenAI chat API on llama.cpp, to look at with
// ebpfllm: the real engine with its memory-mapped model, in a Go server that
// does not trace itself unless asked to. It calls llama.cpp's shared libraries
// directly, without cgo.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "llamacpp:", err)
		os.Exit(1)
	}
}

func run() error {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to serve on; port 0 takes a free one, which is then printed")
	libraries := flag.String("libraries", "", "`directory` of libllama.so and its companions")
	model := flag.String("model", "model.gguf", "model `file`")
	generate := flag.Bool("generate", false, "write a model with random weights to -model and exit")
	threads := flag.Int("threads", 1, "threads that compute; more than there are idle CPUs make it much slower")
	uninstrumented := flag.Bool("uninstrumented", false, "run without the OpenTelemetry SDK")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see -help", flag.Arg(0))
	}
	if *generate {
		return generateModel(*model)
	}
	e, err := openEngine(*libraries, *model, *threads)
	if err != nil {
		return err
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	mux := http.NewServeMux()
	mux.Handle("POST /v1/chat/completions", chat{e})
	var handler http.Handler = mux
	if !*uninstrumented {
		shutdown, err := startTelemetry(ctx)
		if err != nil {
			return err
		}
		defer shutdown()
		handler = otelhttp.NewHandler(mux, "llamacpp", otelhttp.WithSpanNameFormatter(
			func(_ string, r *http.Request) string { return r.Method + " " + r.URL.Path }))
	}
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Printf("listening on http://%s\n", listener.Addr())
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(deadline)
}

// startTelemetry sends spans by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT.
func startTelemetry(ctx context.Context) (shutdown func(), err error) {
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("OTLP exporter: %w", err)
	}
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "llamacpp")),
		resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("resource: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter, sdktrace.WithBatchTimeout(200*time.Millisecond)),
		sdktrace.WithResource(res))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	return func() {
		deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := provider.Shutdown(deadline); err != nil {
			slog.Warn("telemetry: last spans lost", "error", err)
		}
	}, nil
}

// chat answers POST /v1/chat/completions.
type chat struct{ engine *engine }

func (c chat) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Messages []struct {
			Role    string `json:"role"`
			Content string `json:"content"`
		} `json:"messages"`
		MaxTokens   int  `json:"max_tokens"`
		Stream      bool `json:"stream"`
		TopLogprobs int  `json:"top_logprobs"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&q); err != nil {
		fail(w, "request body: "+err.Error())
		return
	}
	if q.MaxTokens == 0 {
		q.MaxTokens = 16
	}
	if len(q.Messages) == 0 || q.MaxTokens < 1 || q.MaxTokens > contextSize || q.TopLogprobs < 0 || q.TopLogprobs > 20 {
		fail(w, fmt.Sprintf("needs messages, max_tokens from 1 to %d and top_logprobs from 0 to 20", contextSize))
		return
	}
	var prompt strings.Builder
	for _, m := range q.Messages {
		prompt.WriteString(m.Role + ": " + m.Content + "\n")
	}

	object, text := "chat.completion.chunk", strings.Builder{}
	completion := func(choice map[string]any) []byte {
		choice["index"] = 0
		data, err := json.Marshal(map[string]any{
			"object": object, "created": time.Now().Unix(), "model": "tiny-random", "choices": []any{choice},
		})
		if err != nil {
			panic(err) // maps, strings and numbers: it cannot
		}
		return data
	}
	flusher := http.NewResponseController(w)
	started := false
	_, err := c.engine.generate(r.Context(), prompt.String(), q.MaxTokens, q.TopLogprobs, func(ranked []candidate) error {
		text.WriteString(ranked[0].text)
		if !q.Stream {
			return nil
		}
		if !started {
			started = true
			w.Header().Set("Content-Type", "text/event-stream")
		}
		choice := map[string]any{"delta": map[string]any{"role": "assistant", "content": ranked[0].text}}
		if q.TopLogprobs > 0 {
			choice["logprobs"] = map[string]any{"content": []any{logprob(ranked[0], ranked)}}
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", completion(choice)); err != nil {
			return err
		}
		return flusher.Flush()
	})
	switch {
	case errors.Is(err, errTooLong):
		fail(w, err.Error())
	case err != nil && started:
		slog.Error("answer broken off", "error", err)
		panic(http.ErrAbortHandler) // the client must not take it for whole
	case err != nil:
		slog.Error("no answer", "error", err)
		http.Error(w, `{"error":{"message":"the engine failed"}}`, http.StatusInternalServerError)
	case q.Stream:
		fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", completion(map[string]any{"delta": map[string]any{}, "finish_reason": "length"}))
	default:
		object = "chat.completion"
		w.Header().Set("Content-Type", "application/json")
		w.Write(completion(map[string]any{
			"message": map[string]any{"role": "assistant", "content": text.String()}, "finish_reason": "length",
		}))
	}
}

func logprob(c candidate, top []candidate) map[string]any {
	bytes := make([]int, len(c.text))
	for i := range c.text {
		bytes[i] = int(c.text[i])
	}
	l := map[string]any{"token": c.text, "logprob": c.logprob, "bytes": bytes}
	if top != nil {
		var list []any
		for _, t := range top {
			list = append(list, logprob(t, nil))
		}
		l["top_logprobs"] = list
	}
	return l
}

func fail(w http.ResponseWriter, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": message, "type": "invalid_request_error"}})
}
