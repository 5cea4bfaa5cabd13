package loadtest

import (
	"errors"
	"fmt"
	"io"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Request is a request as the load generator knows it.
type Request struct {
	sent
	Fault  stage.Stage   // stage.Unknown for a normal one
	Lone   bool          // a spike by itself, not one of a burst
	Taken  time.Duration // the delay that the fault caused
	Missed bool          // a fault was meant for it but came too late: it is a normal one

	// Disturbed tells that this machine delayed the server's threads for more
	// than half as long as the fault did, by the scheduler's account. Such a
	// request proves nothing: it is neither a spike nor a normal one.
	Disturbed bool
}

// Kept is a trace that the collector kept.
type Kept struct {
	Trace     *Trace
	Request   *Request // nil if it belongs to no request of ours
	HostStall bool     // a normal request that the kernel saw stalled for MinStall or more
	Right     bool     // a spike, and spike.stage names what was done to it
}

// Report is the outcome of a run. Warm-up requests count as normal ones: the
// collector does not know of the difference.
type Report struct {
	Requests, Spikes      int
	KeptSpikes            int // spikes whose trace was kept
	RightStage            int // of those, with the right stage to blame
	KeptNormal            int // normal requests kept although nothing delayed them
	HostStalls            int // normal requests that the machine itself delayed, and kept for it
	Strangers             int // kept traces that belong to no request of ours
	Disturbed             int // delayed requests that the machine disturbed so much that they do not count
	Missed                int // faults that came too late to delay their request; it counts as normal
	Kept                  []Kept
	Dropped               []*Request // spikes whose trace was not kept
	Losses                []string   // the collector's counters of things that went wrong
	spikesBy, rightBy     map[stage.Stage]int
	wrong                 map[stage.Stage]map[string]int
	keptBy                map[stage.Stage]int
	load, decision, total time.Duration
}

// judge compares what was kept with what was sent.
func judge(requests []*Request, traces []*Trace) *Report {
	r := &Report{
		Requests: len(requests),
		spikesBy: map[stage.Stage]int{}, rightBy: map[stage.Stage]int{}, keptBy: map[stage.Stage]int{},
		wrong: map[stage.Stage]map[string]int{},
	}
	for _, q := range requests {
		switch {
		case q.Missed:
			r.Missed++
		case q.Disturbed:
			r.Disturbed++
		case q.Fault != stage.Unknown:
			r.Spikes++
			r.spikesBy[q.Fault]++
		}
	}
	find := finder(requests)
	kept := map[*Request]bool{}
	for _, t := range traces {
		k := Kept{Trace: t, Request: find(t)}
		switch {
		case k.Request == nil:
			r.Strangers++
		case k.Request.Disturbed:
		case k.Request.Fault != stage.Unknown:
			r.KeptSpikes++
			r.keptBy[k.Request.Fault]++
			blamed := t.Decision("spike.stage")
			if k.Right = blamed == k.Request.Fault.String(); k.Right {
				r.RightStage++
				r.rightBy[k.Request.Fault]++
			} else {
				if r.wrong[k.Request.Fault] == nil {
					r.wrong[k.Request.Fault] = map[string]int{}
				}
				r.wrong[k.Request.Fault][blamed]++
			}
		case t.Stalled() >= MinStall:
			k.HostStall = true
			r.HostStalls++
		default:
			r.KeptNormal++
		}
		r.Kept = append(r.Kept, k)
		kept[k.Request] = true
	}
	for _, q := range requests {
		if q.Fault != stage.Unknown && !q.Disturbed && !kept[q] {
			r.Dropped = append(r.Dropped, q)
		}
	}
	return r
}

// finder returns a function that finds the request of a trace: by its id, or,
// where the receiver had to invent that, by the client's port and the time.
func finder(requests []*Request) func(*Trace) *Request {
	byID := map[pcommon.TraceID]*Request{}
	byPort := map[int][]*Request{}
	for _, q := range requests {
		byID[q.TraceID] = q
		byPort[q.Port] = append(byPort[q.Port], q)
	}
	return func(t *Trace) *Request {
		if q := byID[t.ID]; q != nil {
			return q
		}
		span, ok := t.Request()
		if !ok {
			return nil
		}
		port, ok := span.Attributes().Get("client.port")
		if !ok {
			return nil
		}
		middle := span.StartTimestamp().AsTime().Add(span.Duration() / 2)
		for _, q := range byPort[int(port.Int())] {
			if middle.After(q.Start) && middle.Before(q.Start.Add(q.Latency)) {
				return q
			}
		}
		return nil
	}
}

// Normal is the number of normal requests.
func (r *Report) Normal() int { return r.Requests - r.Spikes - r.Disturbed }

// Err tells why the run does not show what it should: nine spikes in ten kept
// with the right stage, and no more than one normal request in a hundred.
func (r *Report) Err() error {
	switch {
	case r.Spikes == 0:
		return errors.New("no spike was injected")
	case r.RightStage*10 < r.Spikes*9:
		return fmt.Errorf("only %d of %d spikes were kept with the right stage", r.RightStage, r.Spikes)
	case r.KeptNormal*100 > r.Normal():
		return fmt.Errorf("%d of %d normal requests were kept", r.KeptNormal, r.Normal())
	}
	return nil
}

// Write writes the report: each kept trace as a tree, then a table, then one
// line for machines.
func (r *Report) Write(w io.Writer) {
	for _, k := range r.Kept {
		drawKept(w, k)
	}
	fmt.Fprintf(w, "%-12s %8s %8s %8s\n", "injected", "spikes", "kept", "right")
	for _, s := range stage.All() {
		if r.spikesBy[s] == 0 {
			continue
		}
		fmt.Fprintf(w, "%-12s %8d %8d %8d", s, r.spikesBy[s], r.keptBy[s], r.rightBy[s])
		for _, other := range append(stage.All(), stage.Unknown) {
			if n := r.wrong[s][other.String()]; n > 0 {
				fmt.Fprintf(w, "   %d blamed on %s", n, other)
			}
		}
		if n := r.wrong[s][""]; n > 0 {
			fmt.Fprintf(w, "   %d without a stage", n)
		}
		fmt.Fprintln(w)
	}
	for _, q := range r.Dropped {
		fmt.Fprintf(w, "not kept: %s, %s took %s of %s\n", q.TraceID, q.Fault, milliseconds(q.Taken), milliseconds(q.Latency))
	}
	if r.HostStalls > 0 {
		fmt.Fprintf(w, "host stalls: %d normal requests were kept because this machine stalled them for %v or more, by their own kernel record\n", r.HostStalls, MinStall)
	}
	if r.Missed > 0 {
		fmt.Fprintf(w, "%d faults came too late to delay their request and were tried again\n", r.Missed)
	}
	if r.Disturbed > 0 {
		fmt.Fprintf(w, "%d faults were tried again because this machine kept the server from its CPU meanwhile, by the scheduler's account\n", r.Disturbed)
	}
	if r.Strangers > 0 {
		fmt.Fprintf(w, "%d kept traces belong to no request of this run\n", r.Strangers)
	}
	for _, loss := range r.Losses {
		fmt.Fprintf(w, "collector: %s\n", loss)
	}
	fmt.Fprintf(w, "load %.1f s, decisions %.1f s, in all %.1f s\n", r.load.Seconds(), r.decision.Seconds(), r.total.Seconds())
	fmt.Fprintf(w, "requests=%d spikes=%d kept_spikes=%d right_stage=%d kept_normal=%d\n",
		r.Requests, r.Spikes, r.KeptSpikes, r.RightStage, r.KeptNormal)
}
