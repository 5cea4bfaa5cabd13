package spikesamplingprocessor

import (
	"fmt"
	"sync"
)

// delivery hands kept traces on in a goroutine of its own: however long the next
// component takes, decisions go on, and what was decided is written down. All of
// it is under the processor's lock.
type delivery struct {
	changed   sync.Cond
	parcels   []parcel
	unwritten undecided     // kept traces in these that no storage has
	pending   int           // parcels not handed on yet, with the one in hand, and what the last process left
	left      keptBatches   // by the last process, in the storage
	upTo      int           // batches in the storage below this number have been handed on
	cut       bool          // a shutdown cut a call short: from there on all stays in the storage
	ended     bool          // no more parcels come
	over      chan struct{} // closed when the goroutine ends
}

// parcel is the kept traces of one tick.
type parcel struct {
	traces []*keptTrace
	upTo   int // those that are written are in the storage's batches below this number
}

// begin sets up the delivery, with what the last process left before it.
func (d *delivery) begin(mu *sync.Mutex) {
	d.changed.L = mu
	d.pending = 1
	d.over = make(chan struct{})
}

// handOn writes down what was kept since the last tick, and gives it to the
// delivery.
func (p *spikeSampling) handOn() {
	p.mu.Lock()
	out := p.outbox
	p.outbox, p.waiting = nil, 0
	p.mu.Unlock()
	upTo := p.record(out)
	p.forget()
	if len(out) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range out {
		if !k.written {
			p.delivery.unwritten.add(k, 1)
		}
	}
	p.delivery.parcels = append(p.delivery.parcels, parcel{out, upTo})
	p.delivery.pending++
	p.delivery.changed.Broadcast()
}

// drain returns once all that was given to the delivery is handed on.
func (p *spikeSampling) drain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.delivery.pending > 0 {
		p.delivery.changed.Wait()
	}
}

// endDelivery returns once the delivery's goroutine has ended.
func (p *spikeSampling) endDelivery() {
	p.mu.Lock()
	p.delivery.ended = true
	p.delivery.changed.Broadcast()
	p.mu.Unlock()
	<-p.delivery.over
}

// deliver hands on what the last process left and then each parcel, in order,
// until endDelivery.
func (p *spikeSampling) deliver() {
	defer close(p.delivery.over)
	p.delivered(p.resend())
	for {
		p.mu.Lock()
		for len(p.delivery.parcels) == 0 && !p.delivery.ended {
			p.delivery.changed.Wait()
		}
		if len(p.delivery.parcels) == 0 {
			p.mu.Unlock()
			return
		}
		next := p.delivery.parcels[0]
		p.delivery.parcels[0] = parcel{} // what is handed on is not kept alive
		p.delivery.parcels = p.delivery.parcels[1:]
		p.mu.Unlock()
		for _, k := range next.traces {
			p.send(k)
		}
		p.delivered(next.upTo)
	}
}

// delivered notes what the storage need not keep.
func (p *spikeSampling) delivered(upTo int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.delivery.cut {
		p.delivery.upTo = upTo
	}
	p.delivery.pending--
	p.delivery.changed.Broadcast()
}

// send hands a kept trace on, and gives up its place in the buffer. One that was
// written down is left to the next process if a shutdown cuts the call short.
func (p *spikeSampling) send(k *keptTrace) {
	td, malformed := p.assemble(k)
	var err error
	if spans := td.SpanCount(); spans > 0 {
		if err = p.next.ConsumeTraces(p.ctx, td); err != nil {
			err = fmt.Errorf("trace of %d spans: %w", spans, err)
		}
	}
	left := err != nil && k.written && p.ctx.Err() != nil
	if err != nil && !left {
		p.refused(err, len(k.records)-malformed)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delivery.cut = p.delivery.cut || left
	if !k.written {
		p.delivery.unwritten.add(k, -1)
	}
	p.count.drop(dropMalformed, malformed)
	p.outboxBytes -= k.bytes
	p.buffer.free(k.records, k.bytes)
}
