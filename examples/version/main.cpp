// The smallest program with libfurious:
//
//     cmake -S . -B build -DCMAKE_PREFIX_PATH=<where furious was installed> && cmake --build build && build/version
#include <furious/version.h>

#include <iostream>

int main() {
  std::cout << "furious " << furious::version() << '\n';
}
