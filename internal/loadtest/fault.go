package loadtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// fault is a way to delay a request by something that really happens to
// servers. Each acts on the server from outside.
type fault struct {
	what    string // one line for the reader of a report
	request func(size int) request
	// strike sends the request and delays it. The returned time is what was
	// taken from it.
	strike func(context.Context, *rig, request) (sent, time.Duration, error)
}

// streamed is the request that most faults strike.
func streamed(size int) request { return request{words: size, tokens: size, stream: true} }

// verbose is one with a short question and an answer of 13 kB or more, too large
// for a small buffer; the server computes little longer than for a normal request.
func verbose(size int) request {
	return request{words: size / 2, tokens: size + 4, stream: true, logprobs: true, slowReader: true}
}

// faults are the delays by the stage that has to be blamed for them.
var faults = map[stage.Stage]fault{
	stage.PageFault:  {"the weights were evicted from the page cache", streamed, strikePageFault},
	stage.SendBuffer: {"the client stopped reading", verbose, strikeSendBuffer},
	stage.Lock:       {"another process held the state file's lock", streamed, strikeLock},
	stage.RunQueue:   {"another process took the server's CPU", streamed, strikeRunQueue},
	stage.Stopped:    {"the server was stopped by a signal", streamed, strikeStopped},
}

// Kinds are the faults that can be injected, in the order of the stages.
func Kinds() []stage.Stage {
	var kinds []stage.Stage
	for _, s := range stage.All() {
		if _, ok := faults[s]; ok {
			kinds = append(kinds, s)
		}
	}
	return kinds
}

// rig is a server under test with the means to disturb it.
type rig struct {
	server *server
	client *client
	delay  time.Duration // length of a fault, where it can be chosen
	usual  time.Duration // latency of a streamed request that nothing delayed

	// contention is the length of a fault that takes the CPU: it has to stand
	// out from what the other work of this machine does to normal requests.
	contention time.Duration
}

// strikePageFault empties the page cache of the weights, and goes on emptying it
// for the delay, as happens where memory is short: each pass over the weights
// costs reads. Afterwards it reads them back in, so that the next request does
// not pay as well.
func strikePageFault(ctx context.Context, r *rig, q request) (sent, time.Duration, error) {
	pid, weights := r.server.process.PID(), r.server.weights
	if err := disturb.EvictMapping(pid, weights); err != nil {
		return sent{}, 0, fmt.Errorf("evict %s: %w", weights, err)
	}
	served := make(chan struct{})
	evicted := make(chan error, 1)
	go func() {
		for end := time.Now().Add(r.usual + r.delay); ; {
			select {
			case <-served:
				evicted <- nil
				return
			case <-time.After(5 * time.Millisecond):
			}
			if time.Now().After(end) {
				evicted <- nil
				return
			}
			// The server reads pages back in meanwhile: some are always left.
			if err := disturb.EvictMappingOnce(pid, weights); err != nil {
				evicted <- fmt.Errorf("evict %s: %w", weights, err)
				return
			}
		}
	}()
	s, err := r.client.do(ctx, q, nil)
	close(served)
	if err := errors.Join(err, <-evicted); err != nil {
		return s, 0, err
	}
	return s, s.Latency - r.usual, disturb.Warm(weights)
}

// strikeSendBuffer stops reading after the first chunk, until the server has
// computed the rest, and for the whole delay after that.
func strikeSendBuffer(ctx context.Context, r *rig, q request) (sent, time.Duration, error) {
	s, err := r.client.do(ctx, q, func() error { return sleep(ctx, r.usual+r.delay) })
	return s, s.Latency - r.usual, err
}

// strikeLock holds the lock that the request needs until the request has waited
// for it for the whole delay.
func strikeLock(ctx context.Context, r *rig, q request) (sent, time.Duration, error) {
	file, err := os.OpenFile(r.server.lock, os.O_RDWR, 0)
	if err != nil {
		return sent{}, 0, err
	}
	defer file.Close()
	var info unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &info); err != nil {
		return sent{}, 0, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return sent{}, 0, err
	}
	released := make(chan error, 1)
	go func() {
		err := waitForWaiter(ctx, info.Ino)
		if err == nil {
			err = sleep(ctx, r.delay)
		}
		released <- errors.Join(err, unix.Flock(int(file.Fd()), unix.LOCK_UN))
	}()
	s, err := r.client.do(ctx, q, nil)
	return s, r.delay, errors.Join(err, <-released)
}

// waitForWaiter returns when somebody waits for a lock on the file.
func waitForWaiter(ctx context.Context, inode uint64) error {
	suffix := fmt.Sprintf(":%d 0 EOF", inode)
	for range 2000 {
		locks, err := os.ReadFile("/proc/locks")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(locks)) {
			if strings.Contains(line, "-> FLOCK") && strings.HasSuffix(strings.TrimSpace(line), suffix) {
				return nil
			}
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	return errors.New("the server did not ask for its lock")
}

// strikeRunQueue keeps the server's CPU busy with threads of higher priority
// while the request is being served.
func strikeRunQueue(ctx context.Context, r *rig, q request) (sent, time.Duration, error) {
	burn := disturb.PrepareBurners(r.server.cpu)
	defer func() { _ = burn(0) }()
	return r.strikeAtFirstChunk(ctx, q, r.contention, func() error { return burn(r.contention) })
}

// strikeStopped stops the server while the request is being served.
func strikeStopped(ctx context.Context, r *rig, q request) (sent, time.Duration, error) {
	return r.strikeAtFirstChunk(ctx, q, r.delay, func() error {
		if err := unix.Kill(r.server.process.PID(), unix.SIGSTOP); err != nil {
			return err
		}
		err := sleep(ctx, r.delay)
		return errors.Join(err, unix.Kill(r.server.process.PID(), unix.SIGCONT))
	})
}

// strikeAtFirstChunk sends the request and calls act when its first chunk is
// there; meanwhile the client goes on reading. act takes the delay, but the
// request may be over before it has an effect: then nothing was taken from it.
func (r *rig) strikeAtFirstChunk(ctx context.Context, q request, delay time.Duration, act func() error) (sent, time.Duration, error) {
	done := make(chan error, 1)
	s, err := r.client.do(ctx, q, func() error {
		go func() { done <- act() }()
		return nil
	})
	if err != nil {
		return s, 0, err
	}
	return s, min(delay, s.Latency-r.usual), <-done
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
