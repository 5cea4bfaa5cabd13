package loadtest

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// alike is the number of like-named spans under one parent that are drawn one
// by one; the rest is summed up in a line.
const alike = 3

// draw writes a trace as a tree: each span with its length and, on the
// receiver's, the stages it was made of.
func (t *Trace) draw(w io.Writer) {
	known := map[pcommon.SpanID]bool{}
	for _, s := range t.Spans {
		known[s.SpanID()] = true
	}
	children := map[pcommon.SpanID][]Span{}
	for _, s := range t.Spans {
		parent := s.ParentSpanID()
		if !known[parent] {
			parent = pcommon.SpanID{} // the caller's span, which is not here
		}
		children[parent] = append(children[parent], s)
	}
	drawn := map[pcommon.SpanID]bool{}
	var walk func(parent pcommon.SpanID, indent string)
	walk = func(parent pcommon.SpanID, indent string) {
		count, sum := map[string]int{}, map[string]time.Duration{}
		for _, s := range children[parent] {
			if drawn[s.SpanID()] {
				continue // ids of a hostile trace may be no tree
			}
			drawn[s.SpanID()] = true
			if count[s.Name()]++; count[s.Name()] > alike {
				sum[s.Name()] += s.Duration()
				continue
			}
			fmt.Fprintf(w, "%s%-*s %10s  %s\n", indent, max(1, 44-len(indent)), s.Name(), milliseconds(s.Duration()), s.details())
			walk(s.SpanID(), indent+"  ")
		}
		for _, name := range slices.Sorted(maps.Keys(sum)) {
			fmt.Fprintf(w, "%s%-*s %10s\n", indent, max(1, 44-len(indent)), fmt.Sprintf("… %d more %s", count[name]-alike, name), milliseconds(sum[name]))
		}
	}
	walk(pcommon.SpanID{}, "    ")
}

// details is what a span's line says after its length.
func (s Span) details() string {
	if !s.Kernel {
		return s.Service
	}
	type part struct {
		name string
		d    time.Duration
	}
	var parts []part
	for st, d := range s.Stages() {
		if d >= 100*time.Microsecond {
			parts = append(parts, part{st.String(), d})
		}
	}
	slices.SortFunc(parts, func(a, b part) int { return cmp.Or(cmp.Compare(b.d, a.d), cmp.Compare(a.name, b.name)) })
	var text []string
	for _, p := range parts {
		text = append(text, p.name+" "+milliseconds(p.d))
	}
	for _, a := range [][2]string{{"ebpfllm.syscall.name", "in "}, {"system.paging.fault.type", ""}, {"ebpfllm.shared_by", "shared by "}} {
		if v, ok := s.Attributes().Get(a[0]); ok {
			text = append(text, a[1]+v.AsString())
		}
	}
	if v, ok := s.Attributes().Get("ebpfllm.incomplete"); ok && v.Bool() {
		text = append(text, "incomplete")
	}
	return "kernel: " + strings.Join(text, ", ")
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// drawKept writes one kept trace with what is known about it.
func drawKept(w io.Writer, k Kept) {
	fmt.Fprintf(w, "trace %s: ", k.Trace.ID)
	switch {
	case k.Request == nil:
		fmt.Fprint(w, "no request of ours")
	case k.Request.Disturbed:
		fmt.Fprintf(w, "%s, but this machine delayed it too", faults[k.Request.Fault].what)
	case k.Request.Fault != stage.Unknown:
		shape := "one of a burst"
		if k.Request.Lone {
			shape = "alone"
		}
		fmt.Fprintf(w, "%s (%s), took %s of %s", faults[k.Request.Fault].what, shape, milliseconds(k.Request.Taken), milliseconds(k.Request.Latency))
	case k.HostStall:
		fmt.Fprintf(w, "a normal request that the host itself stalled for %s of %s", milliseconds(k.Trace.Stalled()), milliseconds(k.Request.Latency))
	default:
		fmt.Fprintf(w, "a normal request of %s", milliseconds(k.Request.Latency))
	}
	fmt.Fprintln(w)
	for _, name := range []string{"spike.stage", "spike.cluster.id", "spike.baseline", "spike.reason", "spike.root_cause", "spike.recommendation"} {
		if v := k.Trace.Decision(name); v != "" {
			fmt.Fprintf(w, "    %s: %s\n", name, v)
		}
	}
	k.Trace.draw(w)
	fmt.Fprintln(w)
}
