package spikesamplingprocessor

import (
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/sampling"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
	"github.com/ebpfllm/ebpfllm/internal/rootcause"
)

// What this processor writes on kept traces: on their local roots and their
// kernel.request spans.
const (
	attrClusterID      = "spike.cluster.id"
	attrClusterStart   = "spike.cluster.start"
	attrClusterEnd     = "spike.cluster.end"
	attrClusterSize    = "spike.cluster.size"
	attrClusterTraces  = "spike.cluster.traces"
	attrStandsFor      = "spike.stands_for"
	attrIncidentID     = "spike.incident.id"
	attrSpikeStage     = "spike.stage"
	attrReason         = "spike.reason"
	attrBaseline       = "spike.baseline"
	attrBaselineState  = "spike.baseline.state"
	attrRootCause      = "spike.root_cause"
	attrRecommendation = "spike.recommendation"
	attrPolicy         = "spike.policy"
	attrDryRun         = "spike.dry_run.decision"
	attrOutside        = "ebpfllm.outside_parent"
	attrOutsideBefore  = "ebpfllm.outside_parent.before"
	attrOutsideAfter   = "ebpfllm.outside_parent.after"
)

// node is a span that is being put together with its trace.
type node struct {
	ptrace.Span
	*record
}

// assemble makes the trace's spans of its bytes, puts the kernel's in their
// place in the tree and annotates what the decision was about. malformed counts
// the spans that could not be made; that would be a bug.
func (p *spikeSampling) assemble(k *keptTrace) (_ ptrace.Traces, malformed int) {
	td := ptrace.NewTraces()
	resources := map[*resource]ptrace.ResourceSpans{}
	scopes := map[*scope]ptrace.ScopeSpans{}
	nodes := make([]node, 0, len(k.records))
	var proto ptrace.ProtoUnmarshaler
	for i := range k.records {
		rec := &k.records[i]
		ss, ok := scopes[rec.scope]
		if !ok {
			head, err := proto.UnmarshalTraces([]byte(rec.scope.bytes))
			if err != nil || head.ResourceSpans().Len() == 0 {
				malformed++
				continue
			}
			from := head.ResourceSpans().At(0)
			rs, ok := resources[rec.scope.resource]
			if !ok {
				rs = td.ResourceSpans().AppendEmpty()
				from.Resource().MoveTo(rs.Resource())
				rs.SetSchemaUrl(from.SchemaUrl())
				resources[rec.scope.resource] = rs
			}
			ss = rs.ScopeSpans().AppendEmpty()
			from.ScopeSpans().At(0).MoveTo(ss)
			scopes[rec.scope] = ss
		}
		one, err := proto.UnmarshalTraces(rec.bytes())
		if err != nil || one.SpanCount() != 1 {
			malformed++
			continue
		}
		span := ss.Spans().AppendEmpty()
		one.ResourceSpans().At(0).ScopeSpans().At(0).Spans().At(0).MoveTo(span)
		span.SetTraceID(k.id)
		span.SetSpanID(rec.id)
		span.SetParentSpanID(rec.parent)
		nodes = append(nodes, node{Span: span, record: rec})
	}
	place(nodes)
	if !p.cfg.DryRun {
		weigh(k, nodes)
	}
	p.annotate(k, nodes)
	return td, malformed
}

// weigh writes into each span's tracestate with which probability it was kept.
func weigh(k *keptTrace, nodes []node) {
	for i := range nodes {
		ts := nodes[i].TraceState()
		if k.guessed {
			ts.FromRaw(withoutThreshold(ts.AsRaw()))
		} else {
			ts.FromRaw(withThreshold(ts.AsRaw(), k.threshold))
		}
	}
}

// annotate writes the decision on the trace.
func (p *spikeSampling) annotate(k *keptTrace, nodes []node) {
	var cause rootcause.Finding
	if k.top != nil {
		cause = rootcause.Explain(evidence(k.top, nodes))
	}
	for _, i := range marked(k, nodes) {
		attrs := nodes[i].Attributes()
		if k.policy != nil {
			attrs.PutStr(attrPolicy, k.policy.name)
		}
		if k.keep && !k.guessed {
			attrs.PutDouble(attrStandsFor, k.standsFor())
		}
		if p.cfg.DryRun {
			attrs.PutStr(attrDryRun, decisionName(k.keep))
		}
		if k.top == nil {
			if k.policy != nil && !k.late {
				attrs.PutStr(attrReason, k.policy.reason)
			}
			continue
		}
		attrs.PutStr(attrReason, k.top.reason())
		name := k.top.kind.stage.String()
		if k.top.kind == spanSeries {
			name = spanSeries.name
		}
		attrs.PutStr(attrSpikeStage, name)
		if k.top.verdict.State != baseline.Fallback { // unknown is not zero
			attrs.PutDouble(attrBaseline, k.top.verdict.Baseline)
		}
		attrs.PutStr(attrBaselineState, k.top.verdict.State.String())
		attrs.PutStr(attrRootCause, cause.Cause)
		attrs.PutStr(attrRecommendation, cause.Recommendation)
		if c := k.cluster; c != nil {
			attrs.PutStr(attrClusterID, c.id)
			attrs.PutStr(attrClusterStart, timestamp(c.start))
			attrs.PutStr(attrClusterEnd, timestamp(c.end))
			attrs.PutInt(attrClusterSize, int64(c.size))
			attrs.PutInt(attrClusterTraces, int64(c.traces))
			attrs.PutStr(attrIncidentID, c.incident)
		}
	}
}

// timestamp writes ns since the epoch as RFC 3339 with milliseconds.
func timestamp(ns int64) string {
	return time.Unix(0, ns).UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

// marked returns the indices of the spans that carry the decision: local roots
// and kernel requests; without any, the earliest span; of late spans, all.
func marked(k *keptTrace, nodes []node) []int {
	here := make(map[pcommon.SpanID]bool, len(nodes))
	for i := range nodes {
		here[nodes[i].id] = true
	}
	var marked []int
	earliest := 0
	for i := range nodes {
		n := &nodes[i]
		if n.StartTimestamp() < nodes[earliest].StartTimestamp() {
			earliest = i
		}
		root := n.role&roleRoot != 0 && (n.role&roleRemote != 0 || !here[n.parent])
		if k.late || root || n.role&roleKernel != 0 {
			marked = append(marked, i)
		}
	}
	if len(marked) == 0 && len(nodes) > 0 {
		marked = []int{earliest}
	}
	return marked
}

// evidence gathers what the trace says about its top spike.
func evidence(top *spike, nodes []node) rootcause.Evidence {
	e := rootcause.Evidence{Stage: top.kind.stage, Excess: top.excess()}
	if top.kind == spanSeries {
		e.Span = top.operation
		return e
	}
	var longest ptrace.Span
	var found bool
	for i := range nodes {
		n := &nodes[i]
		attrs := n.Attributes()
		if n.role&roleKernel != 0 && n.id == top.span {
			if v, ok := attrs.Get(attrMajor); ok {
				e.Major = v.Double()
			}
			if v, ok := attrs.Get(prefixWaker + top.kind.stage.String()); ok {
				e.Waker = v.Double()
			}
		}
		// parent is the one it came with, whatever it was placed under.
		if n.role&roleOccurrence == 0 || n.parent != top.span {
			continue
		}
		if v, ok := attrs.Get(attrStage); !ok || v.Str() != top.kind.stage.String() {
			continue
		}
		if !found || length(n.Span) > length(longest) {
			longest, found = n.Span, true
		}
	}
	if found {
		if v, ok := longest.Attributes().Get(attrSyscall); ok {
			e.Syscall = v.Str()
		}
		if v, ok := longest.Attributes().Get(attrSharedBy); ok {
			e.SharedBy = int(v.Int())
		}
		if v, ok := longest.Attributes().Get(attrWaker); ok && v.Bool() {
			if v, ok := longest.Attributes().Get(attrPID); ok {
				e.WakerPID = v.Int()
			}
			if v, ok := longest.Attributes().Get(attrTID); ok {
				e.WakerTID = v.Int()
			}
		}
	}
	return e
}

// length returns the span's duration in nanoseconds, negative if its clock was
// set back.
func length(s ptrace.Span) int64 { return int64(s.EndTimestamp()) - int64(s.StartTimestamp()) }

// withThreshold says in the tracestate with which probability the span was kept.
// A stricter threshold that came in stays: the span had passed it already. A
// tracestate that cannot be read is left as it is.
func withThreshold(raw string, threshold sampling.Threshold) string {
	w, err := sampling.NewW3CTraceState(raw)
	if err != nil {
		return raw
	}
	if err := w.OTelValue().UpdateTValueWithSampling(threshold); err != nil {
		return raw // the one that came in is stricter
	}
	return serialize(&w, raw)
}

// withoutThreshold takes the threshold out: no probability is better than a
// wrong one.
func withoutThreshold(raw string) string {
	w, err := sampling.NewW3CTraceState(raw)
	if err != nil {
		return raw
	}
	w.OTelValue().ClearTValue()
	return serialize(&w, raw)
}

// serialize returns raw if the tracestate cannot be written.
func serialize(w *sampling.W3CTraceState, raw string) string {
	var out stringWriter
	if err := w.Serialize(&out); err != nil {
		return raw
	}
	return string(out)
}

type stringWriter []byte

// WriteString implements io.StringWriter.
func (w *stringWriter) WriteString(s string) (int, error) {
	*w = append(*w, s...)
	return len(s), nil
}
