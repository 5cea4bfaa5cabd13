package lab

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// scored scores affected requests of one kind beside ten that take a millisecond.
func scored(s *Scenario, latency time.Duration, said Seen) *Result {
	about := map[*Sample]*Seen{}
	sample := func(took time.Duration, seen Seen) *Sample {
		now := time.Now()
		x := &Sample{Start: now, End: now.Add(took)}
		about[x] = &seen
		return x
	}
	o := &outcome{}
	for range 10 {
		o.unaffected = append(o.unaffected, sample(time.Millisecond, Seen{Stages: map[string]float64{"cpu": 0.001}, Evidence: map[string]float64{SoftirqDelay: 0.0001}}))
		o.affected = append(o.affected, sample(latency, said))
	}
	return score(s, o, &outcome{}, func(x *Sample) *Seen { return about[x] })
}

func TestWhatAFaultCostsBesidesIsToldAndIsNoName(t *testing.T) {
	s := &Scenario{Stage: "reclaim", Brings: []string{"page_fault"}}
	r := scored(s, 51*time.Millisecond, Seen{Stages: map[string]float64{"reclaim": 0.030, "page_fault": 0.020, "cpu": 0.001}})
	assert.Equal(t, 10, r.Right)
	assert.Zero(t, r.LatencyErrorP50)
	r = scored(s, 51*time.Millisecond, Seen{Stages: map[string]float64{"reclaim": 0.010, "page_fault": 0.040, "cpu": 0.001}})
	assert.Zero(t, r.Right, "the other one is named")
	s.Brings = nil
	r = scored(s, 51*time.Millisecond, Seen{Stages: map[string]float64{"reclaim": 0.030, "page_fault": 0.020, "cpu": 0.001}})
	assert.InDelta(t, 0.4, r.LatencyErrorP50, 0.01)
}

func TestEvidenceIsHeldToTheBarsOfALatency(t *testing.T) {
	s := &Scenario{Stage: Nothing, Control: true, Evidence: SoftirqDelay}
	cells := func(r *Result) (names []string) {
		for _, c := range r.Missed() {
			names = append(names, c.What)
		}
		return names
	}
	said := Seen{Stages: map[string]float64{"cpu": 0.001}, Evidence: map[string]float64{SoftirqDelay: 0.0501}}
	assert.Empty(t, cells(scored(s, 51*time.Millisecond, said)))
	said.Evidence = map[string]float64{SoftirqDelay: 0.0301}
	assert.Equal(t, []string{cellP50, cellP95}, cells(scored(s, 51*time.Millisecond, said)), "too small")
	said.Evidence = nil
	assert.Equal(t, []string{cellP50, cellP95}, cells(scored(s, 51*time.Millisecond, said)), "not known is not told")
	said = Seen{Stages: map[string]float64{"cpu": 0.001, "run_queue": 0.050}, Evidence: map[string]float64{SoftirqDelay: 0.0501}}
	assert.Contains(t, cells(scored(s, 51*time.Millisecond, said)), cellBlamed)
}

func TestARequestIsAffectedUntilItsAnswerHasLeftTheHost(t *testing.T) {
	begin := time.Now()
	w := []window{{begin, begin.Add(60 * time.Millisecond)}}
	s := &Scenario{Stage: "send_buffer", Server: Server{Name: "threads"}}
	s.Inject = func(context.Context, *Rig, time.Duration) error { return nil }
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	for _, c := range []struct {
		x                            *Sample
		affected, beside, unaffected int
	}{
		{&Sample{Start: at(-10), End: at(80)}, 1, 0, 0},
		{&Sample{Start: at(-10), End: at(80), Left: at(70)}, 1, 0, 0},
		{&Sample{Start: at(-10), End: at(80), Left: at(5)}, 0, 1, 0},
		{&Sample{Start: at(0), End: at(70)}, 0, 1, 0}, // which came first?
		{&Sample{Start: at(-90), End: at(-80)}, 0, 0, 1},
	} {
		o := classify([]*Sample{c.x}, w, s)
		assert.Len(t, o.affected, c.affected)
		assert.Len(t, o.beside, c.beside)
		assert.Len(t, o.unaffected, c.unaffected)
	}
}
