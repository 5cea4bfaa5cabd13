package lab

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
)

// Seen is what the receiver says of one request. Times are in seconds.
type Seen struct {
	Stages     map[string]float64 // exclusive, by stage
	Sockets    map[string]float64 // plain totals of socket stages
	Wakers     map[string]float64 // the part of Stages that passed on other threads
	Evidence   map[string]float64 // by attribute, where it is known: what is no part of its time
	Duration   float64
	Incomplete []string // why the record is not whole
	Missing    []string // stages that could not be measured
	span       pcommon.SpanID
	parts      []stretch // its occurrences
	began      time.Time
}

// stretch is an occurrence of a stage.
type stretch struct {
	stage    string
	began    time.Time
	took     time.Duration
	shared   bool // by its link method
	sharedBy int64
	links    int
}

// observer is the receiver at work, with what it has said so far.
type observer struct {
	receiver  receiver.Traces
	telemetry *componenttest.Telemetry

	mu    sync.Mutex
	seen  map[pcommon.SpanID]*Seen     // by the parent, which the traceparent named
	parts map[pcommon.SpanID][]stretch // by the request's span
	last  time.Time                    // when something came
}

// observe starts the receiver on processes.
func observe(ctx context.Context, pids []int, warnings zapcore.WriteSyncer) (*observer, error) {
	o := &observer{telemetry: componenttest.NewTelemetry(), seen: map[pcommon.SpanID]*Seen{}, parts: map[pcommon.SpanID][]stretch{}}
	factory := ebpfllmreceiver.NewFactory()
	cfg := factory.CreateDefaultConfig().(*ebpfllmreceiver.Config)
	for _, pid := range pids {
		cfg.Targets = append(cfg.Targets, ebpfllmreceiver.TargetConfig{PID: pid})
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	set := receivertest.NewNopSettings(factory.Type())
	set.TelemetrySettings = o.telemetry.NewTelemetrySettings()
	set.Logger = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()), warnings, zapcore.WarnLevel))
	sink, err := consumer.NewTraces(func(_ context.Context, td ptrace.Traces) error {
		o.consume(td)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if o.receiver, err = factory.CreateTraces(ctx, set, cfg, sink); err != nil {
		return nil, err
	}
	if err := o.receiver.Start(ctx, componenttest.NewNopHost()); err != nil {
		return nil, err
	}
	return o, nil
}

const requestSpan = "kernel.request"

// SoftirqDelay is the attribute that tells how late the softirq came that brought a request.
const SoftirqDelay = "ebpfllm.softirq.delay"

// consume remembers the requests among the spans.
func (o *observer) consume(td ptrace.Traces) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = time.Now()
	for _, rs := range td.ResourceSpans().All() {
		for _, ss := range rs.ScopeSpans().All() {
			for _, s := range ss.Spans().All() {
				if s.Name() == requestSpan {
					o.seen[s.ParentSpanID()] = read(s)
					continue
				}
				began := s.StartTimestamp().AsTime()
				part := stretch{stage: s.Name(), began: began, took: s.EndTimestamp().AsTime().Sub(began), links: s.Links().Len()}
				if v, ok := s.Attributes().Get("ebpfllm.link.method"); ok {
					part.shared = v.Str() == "shared"
				}
				if v, ok := s.Attributes().Get("ebpfllm.shared_by"); ok {
					part.sharedBy = v.Int()
				}
				o.parts[s.ParentSpanID()] = append(o.parts[s.ParentSpanID()], part)
			}
		}
	}
}

// read takes from a request's span what is compared.
func read(s ptrace.Span) *Seen {
	seen := &Seen{
		Stages: map[string]float64{}, Sockets: map[string]float64{}, Wakers: map[string]float64{}, Evidence: map[string]float64{},
		Duration: s.EndTimestamp().AsTime().Sub(s.StartTimestamp().AsTime()).Seconds(),
		span:     s.SpanID(), began: s.StartTimestamp().AsTime(),
	}
	for name, v := range s.Attributes().All() {
		if stage, ok := strings.CutPrefix(name, "ebpfllm.stage."); ok {
			seen.Stages[stage] = v.Double()
		} else if stage, ok := strings.CutPrefix(name, "ebpfllm.socket."); ok {
			seen.Sockets[stage] = v.Double()
		} else if stage, ok := strings.CutPrefix(name, "ebpfllm.waker."); ok {
			seen.Wakers[stage] = v.Double()
		} else if name == SoftirqDelay {
			seen.Evidence[name] = v.Double()
		}
	}
	list := func(name string) (all []string) {
		if v, ok := s.Attributes().Get(name); ok {
			for _, e := range v.Slice().All() {
				all = append(all, e.Str())
			}
		}
		return all
	}
	seen.Incomplete, seen.Missing = list("ebpfllm.incomplete.reasons"), list("ebpfllm.stages.unavailable")
	return seen
}

// of returns what was said of a request, nil if nothing was.
func (o *observer) of(s *Sample) *Seen {
	o.mu.Lock()
	defer o.mu.Unlock()
	seen := o.seen[s.Span]
	if seen != nil {
		seen.parts = o.parts[seen.span]
	}
	return seen
}

// settle waits until all of the requests have been spoken of, or nothing came for
// quiet.
func (o *observer) settle(ctx context.Context, samples []*Sample, quiet time.Duration) error {
	begin := time.Now()
	for {
		missing := 0
		o.mu.Lock()
		for _, s := range samples {
			if o.seen[s.Span] == nil {
				missing++
			}
		}
		last := o.last
		o.mu.Unlock()
		if last.Before(begin) {
			last = begin
		}
		if missing == 0 || time.Since(last) > quiet {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// lost is the number of records that the receiver counted as lost, and of events
// that it could not follow because a map was full. Its counters are a second old
// at most.
func (o *observer) lost() (n int64, err error) {
	for _, name := range []string{"otelcol_receiver_ebpfllm_records_lost", "otelcol_receiver_ebpfllm_map_full"} {
		m, err := o.telemetry.GetMetric(name)
		if err != nil {
			return 0, fmt.Errorf("the receiver's counter %s: %w", name, err)
		}
		sum, ok := m.Data.(metricdata.Sum[int64])
		if !ok {
			return 0, fmt.Errorf("the receiver's counter %s is a %T", name, m.Data)
		}
		for _, p := range sum.DataPoints {
			n += p.Value
		}
	}
	return n, nil
}

// stop ends the receiver.
func (o *observer) stop(ctx context.Context) error {
	err := o.receiver.Shutdown(ctx)
	if e := o.telemetry.Shutdown(ctx); err == nil {
		err = e
	}
	return err
}
