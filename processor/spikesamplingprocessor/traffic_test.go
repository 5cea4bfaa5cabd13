package spikesamplingprocessor

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// traffic makes requests of a streaming server: an application span, and the
// kernel's request with an occurrence where something stalled.
type traffic struct {
	h    *harness
	rng  *rand.Rand
	next uint64
	want map[uint64]string // spiked traces and their stage
}

// request sends one request that ends now. stage may be "".
func (tr *traffic) request(stage string, stall time.Duration) {
	tr.next++
	n := tr.next
	wait := 80*time.Millisecond + time.Duration(tr.rng.IntN(60))*time.Millisecond
	cpu := 5*time.Millisecond + time.Duration(tr.rng.IntN(5000))*time.Microsecond
	total := wait + cpu + stall
	to := tr.h.clock.Sub(epoch)
	from := to - total
	stages := map[string]float64{
		"stage.wait": wait.Seconds(), "stage.cpu": cpu.Seconds(),
		"stage.run_queue": float64(tr.rng.IntN(400)) / 1e6, "stage.page_fault": 0, "stage.lock": 0,
		"stage.send_buffer": float64(tr.rng.IntN(100)) / 1e6, "socket.send_buffer": float64(tr.rng.IntN(200)) / 1e6,
		"socket.receive_queue": float64(tr.rng.IntN(300)) / 1e6, "stage.unattributed": 0,
	}
	k := kernel("llm", request(n<<8|2, n<<8|1, from, to, nil))
	if stage != "" {
		tr.want[n] = stage
		stages["stage."+stage] = stall.Seconds()
		k.spans = append(k.spans, occurrence(n<<8|3, n<<8|2, stage, from+wait/2, from+wait/2+stall))
	}
	for name, v := range stages {
		k.spans[0].attrs["ebpfllm."+name] = v
	}
	tr.h.send(makeTraces(n, k))
	tr.h.send(makeTraces(n, app("llm",
		span{id: n<<8 | 4, parent: n<<8 | 1, name: "POST /v1/chat/completions", kind: 2, from: from + time.Millisecond, to: to - time.Millisecond},
		span{id: n<<8 | 5, parent: n<<8 | 4, name: "generate", kind: 1, from: from + 2*time.Millisecond, to: to - 2*time.Millisecond},
	)))
}

func TestKeepsSpikesWithTheirStageAndDropsNormalTraffic(t *testing.T) {
	h := newHarness(t, nil)
	tr := &traffic{h: h, rng: rand.New(rand.NewPCG(1, 2)), want: map[uint64]string{}}
	for range 400 { // warm up
		tr.request("", 0)
		h.pass(20 * time.Millisecond)
	}
	for len(tr.want) < 200 {
		switch len(tr.want) % 20 {
		case 0: // a burst: several requests hit by one stall
			for range 12 {
				tr.request("page_fault", 150*time.Millisecond+time.Duration(tr.rng.IntN(200))*time.Millisecond)
				h.pass(30 * time.Millisecond)
			}
		case 12, 16:
			tr.request("run_queue", 60*time.Millisecond)
		case 13, 17:
			tr.request("lock", 200*time.Millisecond)
		default:
			tr.request("send_buffer", 90*time.Millisecond)
		}
		for range 20 {
			tr.request("", 0)
			h.pass(50 * time.Millisecond)
		}
	}
	h.pass(20 * time.Second)
	require.Empty(t, h.p.buffer.traces)

	kept := h.kept()
	right, normal, clustered := 0, 0, 0
	for n := uint64(1); n <= tr.next; n++ {
		spans, ok := kept[traceID(n)]
		stage, spiked := tr.want[n]
		switch {
		case ok && !spiked:
			normal++
		case ok:
			entry := named(t, spans, "POST /v1/chat/completions")
			req := named(t, spans, kernelRequest)
			require.Equal(t, entry.SpanID(), req.ParentSpanID())
			require.Equal(t, named(t, spans, "generate").SpanID(), named(t, spans, stage).ParentSpanID())
			if str(entry, attrSpikeStage) == stage {
				right++
			}
			if str(req, attrClusterID) != "" {
				clustered++
				assert.Equal(t, "page_fault", stage, "only bursts are clusters")
			}
		}
	}
	t.Logf("requests=%d spikes=%d right=%d normal=%d clustered=%d", tr.next, len(tr.want), right, normal, clustered)
	assert.Equal(t, len(tr.want), right, "spikes kept with their stage")
	assert.LessOrEqual(t, normal*100, int(tr.next), "at most 1 % of normal requests")
	assert.Equal(t, 120, clustered, "all of each burst")
}
