package loadtest

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

const receiverScope = "github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"

// Trace is a trace that the collector kept.
type Trace struct {
	ID    pcommon.TraceID
	Spans []Span
}

// Span is a span with what stands outside it in OTLP.
type Span struct {
	ptrace.Span
	Service string
	Kernel  bool // the receiver's, not the application's
}

// readTraces reads a file of OTLP JSON, one message a line, in the order in
// which the traces begin.
func readTraces(path string) ([]*Trace, error) {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // nothing was kept
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	traces := map[pcommon.TraceID]*Trace{}
	var unmarshaler ptrace.JSONUnmarshaler
	lines := bufio.NewReader(file)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			data, err := unmarshaler.UnmarshalTraces(line)
			if err != nil {
				return nil, fmt.Errorf("%s, line %d: %w", path, n, err)
			}
			collect(data, traces)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
	}
	sorted := make([]*Trace, 0, len(traces))
	for _, t := range traces {
		slices.SortFunc(t.Spans, func(a, b Span) int {
			return cmp.Or(cmp.Compare(a.StartTimestamp(), b.StartTimestamp()), cmp.Compare(b.EndTimestamp(), a.EndTimestamp()))
		})
		sorted = append(sorted, t)
	}
	slices.SortFunc(sorted, func(a, b *Trace) int {
		return cmp.Compare(a.Spans[0].StartTimestamp(), b.Spans[0].StartTimestamp())
	})
	return sorted, nil
}

func collect(data ptrace.Traces, into map[pcommon.TraceID]*Trace) {
	for _, resource := range data.ResourceSpans().All() {
		service := ""
		if v, ok := resource.Resource().Attributes().Get("service.name"); ok {
			service = v.AsString()
		}
		for _, scope := range resource.ScopeSpans().All() {
			for _, span := range scope.Spans().All() {
				t := into[span.TraceID()]
				if t == nil {
					t = &Trace{ID: span.TraceID()}
					into[t.ID] = t
				}
				t.Spans = append(t.Spans, Span{Span: span, Service: service, Kernel: scope.Scope().Name() == receiverScope})
			}
		}
	}
}

// Request returns the receiver's span of the whole request.
func (t *Trace) Request() (Span, bool) {
	i := slices.IndexFunc(t.Spans, func(s Span) bool { return s.Kernel && s.Name() == "kernel.request" })
	if i < 0 {
		return Span{}, false
	}
	return t.Spans[i], true
}

// Decision returns an attribute that the processor wrote, such as spike.stage,
// from the first span that has it.
func (t *Trace) Decision(name string) string {
	for _, s := range t.Spans {
		if v, ok := s.Attributes().Get(name); ok {
			return v.AsString()
		}
	}
	return ""
}

// Duration is the span's length.
func (s Span) Duration() time.Duration {
	return s.EndTimestamp().AsTime().Sub(s.StartTimestamp().AsTime())
}

// Stages returns the time a kernel.request span spent in each stage. A stage
// that could not be measured is not there.
func (s Span) Stages() map[stage.Stage]time.Duration {
	stages := map[stage.Stage]time.Duration{}
	for name, value := range s.Attributes().All() {
		if name, ok := strings.CutPrefix(name, "ebpfllm.stage."); ok {
			if parsed, ok := stage.Parse(name); ok {
				stages[parsed] = time.Duration(math.Round(value.Double() * 1e9))
			}
		}
	}
	return stages
}

// Stalled is the time a request spent in stages that are delays.
func (t *Trace) Stalled() time.Duration {
	var sum time.Duration
	request, ok := t.Request()
	if !ok {
		return 0
	}
	for s, d := range request.Stages() {
		if s.Stall() {
			sum += d
		}
	}
	return sum
}
