//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componentstatus"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/receiver"
)

// instance is what the pipelines of one configured receiver share: the Collector
// creates a component for each signal, but the kernel side is there once. It runs
// while all of them run: from the last Start to the first Shutdown.
type instance struct {
	cfg      *Config
	settings receiver.Settings
	traces   consumer.Traces  // nil without a traces pipeline
	metrics  consumer.Metrics // nil without a metrics pipeline
	open     opener

	members int // components not yet shut down
	running int // of them, started
	side    *kernelSide
}

// instances are found by their configuration, of which the Collector has one per
// component id.
var instances struct {
	sync.Mutex
	m map[*Config]*instance
}

// member is the component of one pipeline.
type member struct {
	instance *instance
	started  bool
	ended    bool
}

// join adds a pipeline to the receiver's instance.
func join(settings receiver.Settings, cfg *Config, open opener, add func(*instance)) *member {
	instances.Lock()
	defer instances.Unlock()
	if instances.m == nil {
		instances.m = map[*Config]*instance{}
	}
	in := instances.m[cfg]
	if in == nil {
		in = &instance{cfg: cfg, settings: settings, open: open}
		instances.m[cfg] = in
	}
	in.members++
	add(in)
	return &member{instance: in}
}

// Start starts the kernel side once all pipelines of the receiver are started:
// what is behind the others may not take data before.
func (m *member) Start(_ context.Context, host component.Host) error {
	instances.Lock()
	defer instances.Unlock()
	in := m.instance
	switch {
	case m.started || m.ended:
		return errors.New("started twice, or after its shutdown")
	case in.side != nil:
		return errors.New("this pipeline was created after the receiver's other ones had started")
	case in.running+1 == in.members:
		side, err := startKernelSide(in.settings, in.cfg, in.traces, in.metrics, in.open, func(err error) {
			componentstatus.ReportStatus(host, componentstatus.NewPermanentErrorEvent(err))
		})
		if err != nil {
			return err
		}
		in.side = side
	}
	m.started = true
	in.running++
	return nil
}

// Shutdown stops the kernel side at the first pipeline's: what is behind this one
// ends next, and what is behind the others still takes the rest of the data.
func (m *member) Shutdown(ctx context.Context) error {
	instances.Lock()
	defer instances.Unlock()
	if m.ended {
		return nil
	}
	m.ended = true
	in := m.instance
	if in.members--; in.members == 0 {
		delete(instances.m, in.cfg)
	}
	if m.started {
		in.running--
	}
	side := in.side
	if side == nil {
		return nil
	}
	in.side = nil
	return side.stop(ctx)
}
