package spikesamplingprocessor

import (
	"fmt"
	"unicode/utf8"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// attrTruncated lists on a span what was cut, and how long it was.
const attrTruncated = "spike.truncated"

// Bounds of truncation: how deep values are looked into, and how many cuts a span
// lists; the rest is counted by the metric all the same.
const (
	maxValueDepth = 32
	maxCutsListed = 64
)

// cutter cuts the values of attributes that are longer than a bound: prompts and
// completions, as a rule. It never cuts without saying so.
type cutter struct {
	limit int // bytes; 0 cuts nothing
	cuts  int // attributes cut
	found []string
}

// cut shortens the attributes of the span, its events and its links.
func (c *cutter) cut(span ptrace.Span) {
	if c.limit == 0 {
		return
	}
	c.found = c.found[:0]
	c.attributes("", span.Attributes())
	for _, e := range span.Events().All() {
		c.attributes(e.Name()+".", e.Attributes())
	}
	for _, l := range span.Links().All() {
		c.attributes("link.", l.Attributes())
	}
	if len(c.found) > 0 {
		list := span.Attributes().PutEmptySlice(attrTruncated)
		for _, f := range c.found {
			list.AppendEmpty().SetStr(f)
		}
	}
}

func (c *cutter) attributes(prefix string, attrs pcommon.Map) {
	for k, v := range attrs.All() {
		if n := c.value(v, 0); n > 0 {
			c.cuts++
			if len(c.found) < maxCutsListed {
				c.found = append(c.found, fmt.Sprintf("%s: %d bytes", prefix+k, n))
			}
		}
	}
}

// value cuts what is too long in v and returns the length it had, 0 if nothing
// was.
func (c *cutter) value(v pcommon.Value, depth int) (length int) {
	switch v.Type() {
	case pcommon.ValueTypeStr:
		if s := v.Str(); len(s) > c.limit {
			length = len(s)
			v.SetStr(prefixOf(s, c.limit))
		}
	case pcommon.ValueTypeBytes:
		if b := v.Bytes(); b.Len() > c.limit {
			length = b.Len()
			b.FromRaw(b.AsRaw()[:c.limit])
		}
	case pcommon.ValueTypeSlice:
		for _, e := range v.Slice().All() {
			if depth < maxValueDepth {
				length += c.value(e, depth+1)
			}
		}
	case pcommon.ValueTypeMap:
		for _, e := range v.Map().All() {
			if depth < maxValueDepth {
				length += c.value(e, depth+1)
			}
		}
	}
	return length
}

// prefixOf returns at most n bytes of s and no part of a character. It is a copy:
// the rest of s shall not stay in memory.
func prefixOf(s string, n int) string {
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return string([]byte(s[:n]))
}
