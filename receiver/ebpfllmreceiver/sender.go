//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.uber.org/zap"
)

// sender hands batches to the next component from a goroutine of its own, so
// that a slow pipeline never keeps the receiver from reading the kernel's
// records. What is refused for now is tried again for a while.
type sender[T any] struct {
	logger *zap.Logger
	next   downstream[T]
	limit  int64 // items held at the most

	queue    chan parcel[T]
	held     atomic.Int64
	stopping atomic.Bool
	wake     chan struct{} // closed by stop: no more pauses
	done     chan struct{}
	cancel   context.CancelFunc
	after    func(time.Duration) <-chan time.Time
}

// downstream is the next component for one kind of data.
type downstream[T any] struct {
	consume func(context.Context, T) error
	// begin and end surround each delivery for the receiver's own telemetry; end is
	// told the number of items and what became of them.
	begin func(context.Context) context.Context
	end   func(ctx context.Context, items int, err error)
	// rest returns what of a batch is to be tried again after an error.
	rest func(err error, batch T, items int) (T, int)
}

type parcel[T any] struct {
	batch T
	items int
}

const (
	firstPause = 100 * time.Millisecond
	maxPause   = 5 * time.Second
	maxTries   = 12 // some 40 s
	maxParcels = 1024
)

// newSender starts a sender that holds up to limit items.
func newSender[T any](logger *zap.Logger, limit int, next downstream[T]) *sender[T] {
	ctx, cancel := context.WithCancel(context.Background())
	s := &sender[T]{
		logger: logger, next: next, limit: int64(limit), cancel: cancel,
		queue: make(chan parcel[T], maxParcels), wake: make(chan struct{}), done: make(chan struct{}),
		after: time.After,
	}
	go s.run(ctx)
	return s
}

// send takes a batch, or returns false if it holds too much already. It never
// waits.
func (s *sender[T]) send(batch T, items int) bool {
	if s.held.Add(int64(items)) > s.limit {
		s.held.Add(-int64(items))
		return false
	}
	select {
	case s.queue <- parcel[T]{batch, items}:
		return true
	default:
		s.held.Add(-int64(items))
		return false
	}
}

// stop delivers what is held, each batch once, and returns when that is done or
// the context ends. Nothing may be sent afterwards.
func (s *sender[T]) stop(ctx context.Context) error {
	s.stopping.Store(true)
	close(s.wake)
	close(s.queue)
	defer s.cancel()
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *sender[T]) run(ctx context.Context) {
	defer close(s.done)
	for p := range s.queue {
		s.deliver(ctx, p)
		s.held.Add(-int64(p.items))
	}
}

func (s *sender[T]) deliver(ctx context.Context, p parcel[T]) {
	pause := firstPause
	for try := 1; ; try++ {
		op := s.next.begin(ctx)
		err := s.next.consume(op, p.batch)
		if err == nil {
			s.next.end(op, p.items, nil)
			return
		}
		permanent := consumererror.IsPermanent(err)
		if !permanent {
			var left int
			if p.batch, left = s.next.rest(err, p.batch, p.items); left < p.items {
				s.next.end(op, p.items-left, nil)
				op = s.next.begin(ctx)
				p.items = left
			}
		}
		if permanent || try == maxTries || s.stopping.Load() || ctx.Err() != nil {
			s.next.end(op, p.items, err)
			s.logger.Error("The next component refused data, which is lost",
				zap.Int("items", p.items), zap.Int("tries", try), zap.Bool("permanent", permanent), zap.Error(err))
			return
		}
		s.next.end(op, 0, err)
		select {
		case <-s.after(pause):
		case <-s.wake:
		}
		pause = min(2*pause, maxPause)
	}
}
