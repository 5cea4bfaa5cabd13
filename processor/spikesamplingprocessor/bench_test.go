package spikesamplingprocessor

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// BenchmarkConsume takes batches of 1024 spans of as many traces, as they come
// from one service of many, and decides them; nothing is kept.
func BenchmarkConsume(b *testing.B) {
	batch := ptrace.NewTraces()
	for i := range uint64(1024) {
		makeTraces(i, app("svc", span{
			id: 1, kind: server, name: "POST /v1/chat/completions", to: 50 * time.Millisecond,
			attrs: map[string]any{
				"http.request.method": "POST", "url.path": "/v1/chat/completions", "url.scheme": "https", "server.address": "inference.default.svc",
				"server.port": 8443, "http.response.status_code": 200, "network.protocol.version": "1.1", "thread.name": "worker-7",
			},
		})).ResourceSpans().MoveAndAppendTo(batch.ResourceSpans())
	}
	first := batch.ResourceSpans().At(0).ScopeSpans().At(0).Spans()
	for i := 1; i < batch.ResourceSpans().Len(); i++ {
		batch.ResourceSpans().At(i).ScopeSpans().At(0).Spans().MoveAndAppendTo(first)
	}
	kept := 0
	batch.ResourceSpans().RemoveIf(func(ptrace.ResourceSpans) bool { kept++; return kept > 1 })

	h := newHarnessTo(b, nil, consumertest.NewNop())
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		td := ptrace.NewTraces()
		batch.CopyTo(td)
		h.clock = h.clock.Add(40 * time.Second)
		clear(h.p.dropped.of) // or the spans would be late ones
		h.p.dropped.ring = h.p.dropped.ring[:0]
		b.StartTimer()
		if err := h.p.ConsumeTraces(b.Context(), td); err != nil {
			b.Fatal(err)
		}
		h.p.tick()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1024, "ns/span")
}

// BenchmarkAssemble puts a kept trace of 8 spans together.
func BenchmarkAssemble(b *testing.B) {
	h := newHarness(b, nil)
	h.send(makeTraces(1,
		kernel("llm", request(20, 1, 0, 400*time.Millisecond, map[string]float64{"stage.lock": 2}),
			occurrence(21, 20, "lock", 0, 100*time.Millisecond), occurrence(22, 20, "lock", 100*time.Millisecond, 200*time.Millisecond)),
		app("llm",
			span{id: 10, parent: 1, name: "POST", kind: server, to: 399 * time.Millisecond},
			span{id: 11, parent: 10, name: "tokenize", to: 50 * time.Millisecond},
			span{id: 12, parent: 10, name: "prefill", from: 50 * time.Millisecond, to: 100 * time.Millisecond},
			span{id: 13, parent: 10, name: "decode", from: 100 * time.Millisecond, to: 390 * time.Millisecond},
			span{id: 14, parent: 13, name: "step", from: 110 * time.Millisecond, to: 390 * time.Millisecond},
		)))
	tr := h.p.buffer.first
	top := choose(tr.spikes)
	k := &keptTrace{id: tr.id, decision: decision{keep: true, policy: &h.p.policies[0]}, records: tr.records, top: top}
	b.ReportAllocs()
	for b.Loop() {
		if td, malformed := h.p.assemble(k); td.SpanCount() != 8 || malformed != 0 {
			b.Fatal("not whole")
		}
	}
}

// BenchmarkStep is one step of clustering at 20,000 spans a second in traces of
// 8, of which 2 % are spikes, in 8 series, half of them in bursts.
func BenchmarkStep(b *testing.B) {
	const perStep = 20_000 / 8 / 50
	c := testClusters()
	rng := rand.New(rand.NewPCG(1, 1))
	keys := make([]partitionKey, 8)
	for i := range keys {
		keys[i] = partitionKey{"svc", "chat", exclusive[stage.All()[i]].name}
	}
	now := time.Duration(0)
	step := func() {
		burst := now + time.Duration(rng.Int64N(int64(900*time.Millisecond)))
		for i := range perStep {
			if i%2 == 0 {
				c.add(keys[rng.IntN(8)], features{at: at(now + time.Duration(rng.Int64N(int64(time.Second)))), ratio: 2 + 20*rng.Float64()})
			} else {
				c.add(keys[0], features{at: at(burst + time.Duration(rng.Int64N(int64(100*time.Millisecond)))), ratio: 9 + rng.Float64()})
			}
		}
		now += time.Second
		if res := stepNow(c, at(now)); res.err != nil {
			b.Fatal(res.err)
		}
	}
	for range 120 {
		step()
	}
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
}

// Batches are taken in while one partition steps that has as many spikes as are
// clustered; what is reported is how long ConsumeTraces took, how long the steps
// took, and how long of that they held the lock.
func BenchmarkIngestDuringSteps(b *testing.B) {
	h := newHarness(b, func(c *Config) { c.MaxBufferMiB = 4096 })
	rng := rand.New(rand.NewPCG(1, 1))
	add := func(from time.Duration, n int) {
		for range n {
			h.p.clusters.add(lockKey, features{at: at(from + time.Duration(rng.Int64N(int64(time.Second)))), ratio: 2 + 20*rng.Float64()})
		}
	}
	const perSecond = maxPartition/60 - 1
	now := time.Duration(0)
	for range 60 {
		add(now, perSecond)
		now += time.Second
		h.p.step(at(now))
	}
	var steps, locked []time.Duration
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			h.p.mu.Lock()
			add(now, perSecond)
			h.p.mu.Unlock()
			now += time.Second
			h.p.mu.Lock()
			begin := time.Now()
			n := h.p.clusters.take()
			held := time.Since(begin)
			h.p.mu.Unlock()
			begin = time.Now()
			res := h.p.clusters.step(n, at(now))
			steps = append(steps, time.Since(begin))
			h.p.mu.Lock()
			begin = time.Now()
			res.publish()
			locked = append(locked, held+time.Since(begin))
			h.p.mu.Unlock()
		}
	}()
	var took []time.Duration
	for i := uint64(0); b.Loop(); i++ {
		td := makeTraces(i, app("a",
			span{id: 1, parent: 9, to: 1}, span{id: 2, parent: 1, to: 1}, span{id: 3, parent: 2, to: 1}, span{id: 4, parent: 3, to: 1},
			span{id: 5, parent: 4, to: 1}, span{id: 6, parent: 5, to: 1}, span{id: 7, parent: 6, to: 1}, span{id: 8, parent: 7, to: 1}))
		begin := time.Now()
		if err := h.p.ConsumeTraces(context.Background(), td); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begin))
	}
	close(stop)
	<-stopped
	for _, d := range [][]time.Duration{took, steps, locked} {
		slices.Sort(d)
	}
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
	b.ReportMetric(float64(took[len(took)*999/1000].Nanoseconds())/1e3, "p99.9-us")
	b.ReportMetric(float64(steps[len(steps)/2].Nanoseconds())/1e3, "step-us")
	b.ReportMetric(float64(locked[len(locked)/2].Nanoseconds())/1e3, "step-locked-us")
	h.p.mu.Lock()
	h.p.buffer = newBuffer()
	h.p.mu.Unlock()
}
