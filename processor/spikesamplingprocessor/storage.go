package spikesamplingprocessor

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/extension/xextension/storage"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
)

// What is kept in the storage extension:
//
//	baseline          where the baseline is in time, and its groups
//	baseline/…        one group of series each
//	undecided         how many traces a crash would lose
//	kept              which batches of kept traces there are
//	kept/0, kept/1 …  their spans, until the next component has taken them
const (
	keyBaseline  = "baseline"
	keyUndecided = "undecided"
	keyKept      = "kept"
)

// saveInterval is how often the baseline is saved: what a crash makes it forget.
const saveInterval = time.Minute

// keptBatch is how many bytes of kept traces are written at once, about.
const keptBatch = 4 << 20

// memory is what outlives the process. Only the goroutine that decides uses it,
// but for reading the batches of the last process; without a storage extension it
// is nil, and does nothing.
type memory struct {
	client    storage.Client
	release   func()
	kept      keptBatches // as written last
	nextSave  time.Time
	undecided undecided // as written last
}

// undecided says what a crash would lose.
type undecided struct {
	Traces, Spans int
	At            time.Time // to which the counts belong
}

// keptBatches are those from First up to Next.
type keptBatches struct{ First, Next int }

// storageUser is one instance's claim on its part of a storage.
type storageUser struct {
	storage component.Component
	id      component.ID
}

// storageUsers are the instances that run, each of which has its part to itself.
var storageUsers sync.Map

// claim fails where another instance runs on the same part of a storage: a
// processor that is named in two pipelines is there twice.
func claim(ext component.Component, want *component.ID, id component.ID) (release func(), err error) {
	if !reflect.ValueOf(ext).Comparable() {
		return func() {}, nil // which one it is cannot be told
	}
	user := storageUser{ext, id}
	if _, taken := storageUsers.LoadOrStore(user, nil); taken {
		return nil, fmt.Errorf("spike_sampling: storage %q is in use by another %q: a processor that is in two pipelines runs twice, "+
			"and each needs a name of its own, such as %s/a and %s/b", want, id, id.Type(), id.Type())
	}
	return func() { storageUsers.Delete(user) }, nil
}

// openMemory finds the storage extension.
func openMemory(ctx context.Context, host component.Host, want *component.ID, id component.ID) (*memory, error) {
	if want == nil {
		return nil, nil
	}
	ext, ok := host.GetExtensions()[*want]
	if !ok {
		return nil, fmt.Errorf("spike_sampling: storage %q is not there: define it under extensions and list it in service::extensions", want)
	}
	st, ok := ext.(storage.Extension)
	if !ok {
		return nil, fmt.Errorf("spike_sampling: storage %q is no storage extension: name one such as file_storage", want)
	}
	release, err := claim(ext, want, id)
	if err != nil {
		return nil, err
	}
	client, err := st.GetClient(ctx, component.KindProcessor, id, "")
	if err != nil {
		release()
		return nil, fmt.Errorf("spike_sampling: opening storage %q: %w", want, err)
	}
	return &memory{client: client, release: release}, nil
}

func toGob(v any) []byte {
	var b bytes.Buffer
	_ = gob.NewEncoder(&b).Encode(v) // plain structs: cannot fail
	return b.Bytes()
}

// get reads a value that was written by toGob; found is false if there is none.
func (m *memory) get(ctx context.Context, key string, v any) (found bool, err error) {
	data, err := m.client.Get(ctx, key)
	if err != nil || data == nil {
		return false, err
	}
	if err := gob.NewDecoder(bytes.NewReader(data)).Decode(v); err != nil {
		return false, fmt.Errorf("%q in the storage is damaged: %w", key, err)
	}
	return true, nil
}

// savedBaseline is what is under keyBaseline.
type savedBaseline struct {
	Clock baseline.Clock
	Keys  []baseline.Key
}

func groupKey(k baseline.Key) string {
	return fmt.Sprintf("%s/%q/%q", keyBaseline, k.Service, k.Operation)
}

// restore brings back the baseline, as far as it can be read, and says what the
// last process lost. What cannot be read is learned anew; it is no reason not to
// start.
func (p *spikeSampling) restore(ctx context.Context, now time.Time) {
	m := p.memory
	if m == nil {
		return
	}
	var lost undecided
	if _, err := m.get(ctx, keyUndecided, &lost); err != nil {
		p.storageFailed("How many undecided traces were lost at the last end cannot be told", err)
	}
	m.undecided = lost
	if _, err := m.get(ctx, keyKept, &m.kept); err != nil {
		p.storageFailed("Kept traces of the last process cannot be found", err)
	}
	p.delivery.left = m.kept
	if lost.Traces > 0 {
		p.telemetry.ProcessorSpikeSamplingTracesLostAtRestart.Add(p.ctx, int64(lost.Traces))
		p.logger.Warn("The last process ended without deciding these traces; they are lost, but for spans that came after the count",
			zap.Int("traces", lost.Traces), zap.Int("spans", lost.Spans), zap.Time("counted_at", lost.At))
	}
	var saved savedBaseline
	found, err := m.get(ctx, keyBaseline, &saved)
	if err == nil && found {
		err = p.baseline.SetClock(saved.Clock, now)
	}
	if err != nil {
		p.storageFailed("The baseline is learned anew", err)
		return
	}
	groups := 0
	var errs error
	for _, k := range saved.Keys {
		data, err := m.client.Get(ctx, groupKey(k))
		if err == nil && data != nil {
			if err = p.baseline.Load(data); err == nil {
				groups++
			}
		}
		errs = errors.Join(errs, err)
	}
	if errs != nil {
		p.storageFailed("Part of the baseline is learned anew", errs)
	}
	if groups > 0 {
		p.logger.Info("The baseline was restored", zap.Int("operations", groups), zap.Duration("age", now.Sub(saved.Clock.Rotated)))
	}
}

// save writes what has changed of the baseline, and forgets what it has
// forgotten. Each group is read under the lock, and written without.
func (p *spikeSampling) save(now time.Time, last bool) {
	m := p.memory
	if m == nil || !last && now.Before(m.nextSave) {
		return
	}
	m.nextSave = now.Add(saveInterval)
	p.mu.Lock()
	clock, keys := p.baseline.Clock(), p.baseline.Keys()
	clock.Rotated = clock.Rotated.Add(time.Duration(p.ahead)) // the next process has another clock, and the same wall clock
	p.mu.Unlock()
	var before savedBaseline
	_, err := m.get(p.ctx, keyBaseline, &before)
	gone := map[baseline.Key]bool{}
	for _, k := range before.Keys {
		gone[k] = true
	}
	var ops []*storage.Operation
	for _, k := range keys {
		delete(gone, k)
		p.mu.Lock()
		data, saveErr := p.baseline.Save(k)
		p.mu.Unlock()
		err = errors.Join(err, saveErr)
		if data != nil {
			ops = append(ops, storage.SetOperation(groupKey(k), data))
		}
	}
	for _, k := range before.Keys {
		if gone[k] {
			ops = append(ops, storage.DeleteOperation(groupKey(k)))
		}
	}
	ops = append(ops, storage.SetOperation(keyBaseline, toGob(savedBaseline{clock, keys})))
	if err = errors.Join(err, m.client.Batch(p.ctx, ops...)); err != nil {
		p.storageFailed("The baseline was not saved", err)
	}
}

// record writes down the kept traces before they are sent, and how many are
// undecided, or kept but neither written nor sent. What is written a crash does
// not lose. It is in the batches below the number returned.
func (p *spikeSampling) record(out []*keptTrace) (upTo int) {
	m := p.memory
	if m == nil {
		return 0
	}
	p.mu.Lock()
	count := undecided{Traces: len(p.buffer.traces), Spans: p.buffer.spans, At: p.now()}
	for _, k := range p.outbox { // decided since, and not written yet
		count.add(k, 1)
	}
	count.Traces += p.delivery.unwritten.Traces
	count.Spans += p.delivery.unwritten.Spans
	p.mu.Unlock()
	var err error
	if len(out) == 0 && (count.Traces != m.undecided.Traces || count.Spans != m.undecided.Spans) {
		err = m.write(p.ctx, count)
	}
	for _, k := range out {
		count.add(k, 1)
	}
	for len(out) > 0 {
		td, n, rest := ptrace.NewTraces(), 0, count
		for size := 0; n < len(out) && size < keptBatch; n++ {
			one, _ := p.assemble(out[n])
			size += out[n].bytes
			rest.add(out[n], -1)
			one.ResourceSpans().MoveAndAppendTo(td.ResourceSpans())
		}
		batch := out[:n]
		out = out[n:]
		data, marshalErr := (&ptrace.ProtoMarshaler{}).MarshalTraces(td)
		if err = errors.Join(err, marshalErr); marshalErr != nil {
			continue
		}
		key := keptKey(m.kept.Next)
		m.kept.Next++
		if writeErr := m.write(p.ctx, rest, storage.SetOperation(key, data), storage.SetOperation(keyKept, toGob(m.kept))); writeErr != nil {
			err = errors.Join(err, writeErr)
			continue
		}
		count = rest
		for _, k := range batch {
			k.written = true
		}
	}
	if err != nil {
		p.storageFailed("Kept traces were not written down; a crash would lose them", err)
	}
	return m.kept.Next
}

// add counts a kept trace that is not written yet, or with -1 no longer.
func (u *undecided) add(k *keptTrace, n int) {
	u.Traces += n
	u.Spans += n * len(k.records)
}

// write writes the count with the batch it belongs to: either both are there, or
// neither.
func (m *memory) write(ctx context.Context, count undecided, batch ...*storage.Operation) error {
	if err := m.client.Batch(ctx, append(batch, storage.SetOperation(keyUndecided, toGob(count)))...); err != nil {
		return err
	}
	m.undecided = count
	return nil
}

func keptKey(i int) string { return fmt.Sprintf("%s/%d", keyKept, i) }

// forget removes the batches that the next component has.
func (p *spikeSampling) forget() {
	m := p.memory
	if m == nil {
		return
	}
	p.mu.Lock()
	left := keptBatches{p.delivery.upTo, m.kept.Next}
	p.mu.Unlock()
	if left.First <= m.kept.First {
		return
	}
	ops := []*storage.Operation{storage.SetOperation(keyKept, toGob(left))}
	if left.First == left.Next {
		ops[0] = storage.DeleteOperation(keyKept)
	}
	for i := m.kept.First; i < left.First; i++ {
		ops = append(ops, storage.DeleteOperation(keptKey(i)))
	}
	if err := m.client.Batch(p.ctx, ops...); err != nil {
		p.storageFailed("Kept traces that were sent could not be removed; a restart would send them again", err)
		return
	}
	m.kept = left
}

// resend sends the kept traces that the last process had written down and may not
// have sent, and returns the number of the first batch that is not of these.
func (p *spikeSampling) resend() (upTo int) {
	m := p.memory
	if m == nil {
		return 0
	}
	left := p.delivery.left
	spans := 0
	for i := left.First; i < left.Next; i++ {
		data, err := m.client.Get(p.ctx, keptKey(i))
		if err == nil && data != nil {
			var td ptrace.Traces
			if td, err = (&ptrace.ProtoUnmarshaler{}).UnmarshalTraces(data); err == nil {
				n := td.SpanCount()
				sendErr := p.next.ConsumeTraces(p.ctx, td)
				if sendErr != nil && p.ctx.Err() != nil {
					p.mu.Lock()
					p.delivery.upTo, p.delivery.cut = i, true
					p.mu.Unlock()
					return i
				}
				spans += n
				if sendErr != nil {
					p.refused(sendErr, n)
				}
			}
		}
		if err != nil {
			p.storageFailed("Kept traces of the last process cannot be read", err)
		}
	}
	if spans > 0 {
		p.logger.Info("Kept traces that the last process may not have sent were sent", zap.Int("spans", spans))
	}
	return left.Next
}

// close gives the storage back.
func (m *memory) close(ctx context.Context) error {
	if m == nil {
		return nil
	}
	defer m.release()
	if err := m.client.Close(ctx); err != nil {
		return fmt.Errorf("spike_sampling: closing its storage: %w", err)
	}
	return nil
}

// storageFailed counts and logs an error of the storage.
func (p *spikeSampling) storageFailed(what string, err error) {
	p.telemetry.ProcessorSpikeSamplingStorageErrors.Add(p.ctx, 1)
	p.storageLog.Lock()
	defer p.storageLog.Unlock()
	if now := p.now(); now.Sub(p.lastStorageError) >= errorInterval {
		p.lastStorageError = now
		p.logger.Error("The storage extension failed. "+what, zap.Error(err))
	}
}
