package spikesamplingprocessor

import "go.opentelemetry.io/collector/pdata/pcommon"

// cache remembers what was decided about the last size traces, oldest out first.
type cache[V any] struct {
	size int
	of   map[pcommon.TraceID]V
	ring []pcommon.TraceID
	next int // where in ring the next one goes, once it is full
}

func newCache[V any](size int) *cache[V] {
	return &cache[V]{size: size, of: map[pcommon.TraceID]V{}}
}

func (c *cache[V]) get(id pcommon.TraceID) (V, bool) {
	v, ok := c.of[id]
	return v, ok
}

func (c *cache[V]) put(id pcommon.TraceID, v V) {
	if c.size == 0 {
		return
	}
	if _, ok := c.of[id]; !ok {
		if len(c.ring) < c.size {
			c.ring = append(c.ring, id)
		} else {
			delete(c.of, c.ring[c.next])
			c.ring[c.next] = id
			c.next = (c.next + 1) % c.size
		}
	}
	c.of[id] = v
}
