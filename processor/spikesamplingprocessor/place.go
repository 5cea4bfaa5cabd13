package spikesamplingprocessor

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// maxDepth bounds the way up the tree that is walked to rule out a cycle. A span
// deeper than that is left where it is.
const maxDepth = 1000

// place puts the kernel's spans where they belong. The receiver can only name
// the parent that was on the wire; once the application's spans are there, the
// request goes under its entry span, the application span with that same parent,
// and each occurrence under the innermost span of that service that was running
// when it happened.
func place(nodes []node) {
	t := &tree{nodes: nodes}
	for i := range nodes {
		if nodes[i].role&roleKernel == 0 || nodes[i].parent.IsEmpty() {
			continue
		}
		t.init()
		entry, ok := t.entryOf(i)
		if !ok || !t.move(i, entry) {
			continue
		}
		nodes[i].SetKind(ptrace.SpanKindInternal)
		outside(nodes[i].Span, nodes[entry].Span)
		t.placeOccurrences(i, entry)
	}
}

// outside writes how far the request reaches over its entry span: the kernel
// sees it before the application does, and after.
func outside(request, entry ptrace.Span) {
	before := overhang(request.StartTimestamp(), entry.StartTimestamp())
	after := overhang(entry.EndTimestamp(), request.EndTimestamp())
	attrs := request.Attributes()
	attrs.PutDouble(attrOutside, before+after)
	attrs.PutDouble(attrOutsideBefore, before)
	attrs.PutDouble(attrOutsideAfter, after)
}

// overhang returns the seconds from a to b, 0 if b is first.
func overhang(a, b pcommon.Timestamp) float64 {
	if b <= a {
		return 0
	}
	return time.Duration(b - a).Seconds()
}

// tree finds spans by id and by the parent they came with.
type tree struct {
	nodes    []node
	byID     map[pcommon.SpanID]int
	children map[pcommon.SpanID][]int
}

func (t *tree) init() {
	if t.byID != nil {
		return
	}
	t.byID = make(map[pcommon.SpanID]int, len(t.nodes))
	t.children = make(map[pcommon.SpanID][]int, len(t.nodes))
	for i := range t.nodes {
		n := &t.nodes[i]
		if _, ok := t.byID[n.id]; !ok {
			t.byID[n.id] = i
		}
		t.children[n.parent] = append(t.children[n.parent], i)
	}
}

// entryOf returns the entry span of a request: of the application spans with the
// wire's parent the one that is a SERVER span, says its parent is remote, and
// covers most of the request, in this order. A client may have other children
// of the same parent: one that is not a SERVER span must overlap the request.
func (t *tree) entryOf(request int) (int, bool) {
	best, found := 0, false
	for _, i := range t.children[t.nodes[request].parent] {
		n := &t.nodes[i]
		if n.scope.kernel {
			continue
		}
		server := n.Kind() == ptrace.SpanKindServer
		if !server && overlap(n.Span, t.nodes[request].Span) <= 0 {
			continue
		}
		if !found || t.betterEntry(i, best, request) {
			best, found = i, true
		}
	}
	return best, found
}

func (t *tree) betterEntry(a, b, request int) bool {
	rank := func(i int) (int, int, int64) {
		n := &t.nodes[i]
		server, remote := 0, 0
		if n.Kind() == ptrace.SpanKindServer {
			server = 1
		}
		if n.role&roleRemote != 0 {
			remote = 1
		}
		return server, remote, overlap(n.Span, t.nodes[request].Span)
	}
	as, ar, ao := rank(a)
	bs, br, bo := rank(b)
	return cmp.Or(cmp.Compare(as, bs), cmp.Compare(ar, br), cmp.Compare(ao, bo)) > 0
}

// overlap returns the nanoseconds in which both run.
func overlap(a, b ptrace.Span) int64 {
	return int64(min(a.EndTimestamp(), b.EndTimestamp())) - int64(max(a.StartTimestamp(), b.StartTimestamp()))
}

// move puts a span under another, unless that lies below it.
func (t *tree) move(i, under int) bool {
	up := under
	for range maxDepth {
		// Ids are what the tree is made of, and hostile ones may be used twice.
		if t.nodes[up].id == t.nodes[i].id {
			return false
		}
		parent := t.nodes[up].ParentSpanID()
		next, ok := t.byID[parent]
		if parent.IsEmpty() || !ok {
			t.nodes[i].SetParentSpanID(t.nodes[under].id)
			return true
		}
		up = next
	}
	return false // a cycle already, or too deep to tell
}

// placeOccurrences puts the request's occurrences under the innermost spans of
// the entry's service, below the entry, that hold their midpoints. It sweeps
// over both in the order of time.
func (t *tree) placeOccurrences(request, entry int) {
	var occurrences []int
	for _, i := range t.children[t.nodes[request].id] {
		if t.nodes[i].role&roleOccurrence != 0 {
			occurrences = append(occurrences, i)
		}
	}
	if len(occurrences) == 0 {
		return
	}
	slices.SortStableFunc(occurrences, func(a, b int) int {
		return cmp.Compare(midpoint(t.nodes[a].Span), midpoint(t.nodes[b].Span))
	})
	spans := t.below(entry)
	slices.SortStableFunc(spans, func(a, b candidate) int {
		return cmp.Compare(a.StartTimestamp(), b.StartTimestamp())
	})
	var running candidates
	for _, i := range occurrences {
		mid := midpoint(t.nodes[i].Span)
		for len(spans) > 0 && spans[0].StartTimestamp() <= mid {
			heap.Push(&running, spans[0])
			spans = spans[1:]
		}
		// What has ended by now has ended for all later ones too.
		for len(running) > 0 && running[0].EndTimestamp() < mid {
			heap.Pop(&running)
		}
		if len(running) > 0 {
			t.move(i, running[0].index)
		}
	}
}

func midpoint(s ptrace.Span) pcommon.Timestamp {
	if s.EndTimestamp() < s.StartTimestamp() {
		return s.StartTimestamp()
	}
	return s.StartTimestamp() + (s.EndTimestamp()-s.StartTimestamp())/2
}

// candidate is a span that an occurrence may go under.
type candidate struct {
	ptrace.Span
	index, depth int
}

// below returns the entry and the spans of its service below it.
func (t *tree) below(entry int) []candidate {
	service := t.nodes[entry].scope.resource.service
	found := []candidate{{t.nodes[entry].Span, entry, 0}}
	seen := map[int]bool{entry: true}
	for k := 0; k < len(found); k++ { // found grows
		for _, i := range t.children[t.nodes[found[k].index].id] {
			n := &t.nodes[i]
			if !seen[i] && !n.scope.kernel && n.scope.resource.service == service {
				seen[i] = true
				found = append(found, candidate{n.Span, i, found[k].depth + 1})
			}
		}
	}
	return found
}

// candidates is a heap with the innermost span on top: the deepest, of those the
// shortest, of those the first that came.
type candidates []candidate

func (c candidates) Len() int      { return len(c) }
func (c candidates) Swap(i, j int) { c[i], c[j] = c[j], c[i] }
func (c candidates) Less(i, j int) bool {
	return cmp.Or(
		cmp.Compare(c[j].depth, c[i].depth),
		cmp.Compare(length(c[i].Span), length(c[j].Span)),
		cmp.Compare(c[i].index, c[j].index),
	) < 0
}

// Push implements heap.Interface.
func (c *candidates) Push(x any) { *c = append(*c, x.(candidate)) }

// Pop implements heap.Interface.
func (c *candidates) Pop() any {
	old := *c
	last := old[len(old)-1]
	*c = old[:len(old)-1]
	return last
}
