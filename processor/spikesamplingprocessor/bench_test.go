package spikesamplingprocessor

import (
	"math/rand/v2"
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
	k := &keptTrace{decision: decision{keep: true, policy: &h.p.policies[0]}, records: tr.records, top: top}
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
		if res := c.step(at(now)); res.err != nil {
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
