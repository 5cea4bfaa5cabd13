package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// startTelemetry sends spans by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT,
// http://localhost:4318 by default. The returned function sends what is left.
func startTelemetry(ctx context.Context) (shutdown func(), err error) {
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("OTLP exporter: %w", err)
	}
	// Later ones win: the environment's service name over ours.
	res, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "llmserver")),
		resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("resource: %w", err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter, sdktrace.WithBatchTimeout(200*time.Millisecond)),
		sdktrace.WithResource(res))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { slog.Warn("telemetry", "error", err) }))
	return func() {
		deadline, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := provider.Shutdown(deadline); err != nil {
			slog.Warn("telemetry: last spans lost", "error", err)
		}
	}, nil
}

// instrument gives each API request a server span, under the caller's trace
// context.
func instrument(next http.Handler) http.Handler {
	return otelhttp.NewHandler(next, "llmserver",
		otelhttp.WithFilter(func(r *http.Request) bool { return r.URL.Path != "/healthz" }),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return r.Method + " " + r.URL.Path }))
}
