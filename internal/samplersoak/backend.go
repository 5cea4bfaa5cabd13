package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// backEnd takes the traces that are kept.
type backEnd struct {
	address string
	server  *http.Server

	mu     sync.Mutex
	traces map[pcommon.TraceID]bool
	err    error // of a batch that could not be read
}

func startBackEnd() (*backEnd, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &backEnd{address: listener.Addr().String(), traces: map[pcommon.TraceID]bool{}}
	b.server = &http.Server{Handler: b, ReadHeaderTimeout: 10 * time.Second}
	go b.server.Serve(listener) //nolint:errcheck // ends by close
	return b, nil
}

// ServeHTTP takes one batch of OTLP.
func (b *backEnd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var td ptrace.Traces
	if err == nil {
		td, err = (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(body)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		b.err = errors.Join(b.err, err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for _, rs := range td.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				b.traces[s.TraceID()] = true
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (b *backEnd) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	b.server.Shutdown(ctx) //nolint:errcheck // what is cut off then was no longer waited for
}
